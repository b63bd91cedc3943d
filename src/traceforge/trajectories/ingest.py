"""`traceforge ingest`: raw logs in, `trajectories.jsonl` and `manifest.json` out.

Streams   One file, one line at a time. What stays in memory per trajectory is its id and 16 bytes of its hash.
Counts    Everything that is not kept has a reason and a place in the manifest; nothing stops the files after it.
Same      Inputs in the same order give the same records and ids, whatever the machine.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from traceforge import __version__
from traceforge.errors import InputError, StorageError
from traceforge.folders import MANIFEST
from traceforge.trajectories.detect import SideFile, recognise, records_in
from traceforge.trajectories.label_files import read_labels
from traceforge.trajectories.manifest import Counts, FileEntry, IngestSummary, LabelFile, Manifest, by_count
from traceforge.trajectories.outcomes import LabelCounts, Labels, Subject
from traceforge.trajectories.output import TRAJECTORIES, OutputFolder
from traceforge.trajectories.readers.reader import Origin, Reader
from traceforge.trajectories.record import Trajectory, encode
from traceforge.trajectories.refusals import WAYS_OUT, Refusal, Refused
from traceforge.trajectories.sources import InputFile, Read, discover, shown_path
from traceforge.trajectories.text import describe
from traceforge.trajectories.unique_ids import UniqueIds

_NUM_REFUSALS_LISTED = 10_000
_NUM_REFUSALS_SHOWN = 10
_BUFFER_BYTES = 1 << 17
_STEM_SUFFIXES = (".gz", ".jsonl", ".ndjson", ".json", ".traj")


def ingest(inputs: Sequence[str], output: Path, *, labels: Sequence[str] = ()) -> IngestSummary:
    """Write the trajectories of all inputs to a folder and return the counts.

    Args:
        inputs: files, folders and globs of agent logs.
        output: the folder to write; an ingest that is already there is replaced when the new one is complete.
        labels: files, folders and globs of SWE-bench reports and run summaries.

    Raises:
        InputError: an input or a label path names nothing, a named label file is none, or no trajectory is usable
            (the message lists the reasons, and nothing is written).
        StorageError: writing failed; nothing half-written is left.
    """
    label_set = read_labels(labels)
    discovery = discover(inputs, excluded=(output / TRAJECTORIES, output / MANIFEST))
    with OutputFolder(output) as folder:
        run = _Ingest(folder, Labels(label_set.labels))
        for refusal in (*label_set.refusals, *discovery.refusals):
            run.refuse(refusal)
        for path in discovery.files:
            run.read_file(path)
        run.counts.hidden, run.counts.repeated = discovery.num_hidden, discovery.num_repeated
        if run.counts.trajectories == 0:
            raise _nothing_usable(run)
        run.correct_labels()
        label_counts = run.labels.counts()
        folder.commit(msgspec.to_builtins(_manifest(run, inputs, labels, (label_set.files, label_counts))))
    return IngestSummary(
        output=str(output),
        trajectories_file=str(output / TRAJECTORIES),
        manifest_file=str(output / MANIFEST),
        counts=run.counts,
        formats=by_count(run.formats),
        notes=by_count(run.notes),
        refusals_by_reason=by_count(run.reasons),
        labels=label_counts,
    )


class _Ingest:
    """The state of one ingest."""

    def __init__(self, folder: OutputFolder, labels: Labels) -> None:
        self.labels = labels
        self.counts = Counts()
        self.files: list[FileEntry] = []
        self.formats: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.refusals: list[Refusal] = []
        self._folder = folder
        self._ids = UniqueIds()
        self._seen: dict[bytes, str] = {}
        self._stem = ""

    def read_file(self, path: Path) -> None:
        """Read one file to its end; its faults become refusals."""
        entry = FileEntry(path=shown_path(path))
        self._stem = _stem(entry.path)
        try:
            with path.open("rb", buffering=_BUFFER_BYTES) as handle:
                file = InputFile(handle, path)
                self._read_values(file, entry)
                entry.sha256, entry.bytes = file.finish(), file.num_bytes
        except StorageError:
            raise
        except OSError as error:
            self._refuse(entry, None, "unreadable", error.strerror or str(error))
            return
        self.files.append(entry)
        self.counts.files += 1
        self.counts.side_files += entry.format in ("swe-bench-labels", "swe-bench-predictions")

    def _read_values(self, file: InputFile, entry: FileEntry) -> None:
        try:
            for read in file.values(lambda value: recognise(value) is not None):
                self._take(read, entry)
                del read  # A line may be many megabytes; the next one is read when this one is gone.
        except Refused as refused:
            self._refuse(entry, None, refused.reason, refused.detail)

    def _take(self, read: Read, entry: FileEntry) -> None:
        if read.refused is not None:
            self._refuse(entry, read.line, read.refused.reason, read.refused.detail)
            return
        kind = recognise(read.value)
        if kind is None:
            self._refuse(entry, read.line, "unknown_format", f"no known format: {describe(read.value)}")
            return
        items = records_in(read.value)
        for row, record in enumerate([read.value] if items is None else items, start=1):
            origin = Origin(entry.path, self._stem, row=row if items is not None else read.line or 1)
            if read.replaced_surrogates and row == 1:
                origin.notes["replaced_surrogates"] = read.replaced_surrogates
            try:
                self._take_record(record, kind if items is None else recognise(record), origin, entry)
            except Refused as refused:
                if refused.reason == "already_ingested":
                    raise  # Every line of such a file is the same; one verdict on all of it will do.
                detail = refused.detail if items is None else f"item {row}: {refused.detail}"
                self._refuse(entry, read.line, refused.reason, detail)

    def _take_record(self, record: Any, kind: Reader | SideFile | None, origin: Origin, entry: FileEntry) -> None:
        if kind is None:
            raise Refused("unknown_format", f"no known format: {describe(record)}")
        if kind == "traceforge-output":
            raise Refused("already_ingested", "this file was written by `traceforge ingest`")
        if not isinstance(kind, Reader):
            entry.found(kind)
            return
        try:
            trajectory = self._admit(kind.read(record, origin))
        except RecursionError as error:
            raise Refused("too_deeply_nested", "arrays and objects are nested too deeply") from error
        entry.found(trajectory.source_format)
        entry.trajectories += 1
        self.formats[trajectory.source_format] += 1
        self.notes.update(origin.notes)

    def _admit(self, trajectory: Trajectory) -> Trajectory:
        if not trajectory.messages:
            raise Refused("no_messages", "nothing is left without the end marker")
        if not trajectory.turns():
            raise Refused("no_assistant_turn", f"{len(trajectory.messages)} messages, none by the assistant")
        digest = hashlib.sha256(msgspec.json.encode((trajectory.messages, trajectory.tools))).digest()[:16]
        if digest in self._seen:
            raise Refused("duplicate", f"the same messages and tools as {self._seen[digest]!r}")
        names = (trajectory.trajectory_id, self._stem, trajectory.task_id)
        subject = Subject(self.counts.trajectories, names, trajectory.source_file, trajectory.exit_status)
        # The names must be claimed only when nothing can refuse the record any more.
        trajectory = msgspec.structs.replace(
            trajectory,
            trajectory_id=self._ids.claim(trajectory.trajectory_id),
            outcome=self.labels.outcome(subject, trajectory.outcome),
        )
        self._folder.write(encode(trajectory))
        self._seen[digest] = trajectory.trajectory_id
        self.counts.add(trajectory)
        return trajectory

    def correct_labels(self) -> None:
        """Take back labels that proved to be about another run."""
        corrected = self.labels.corrections()
        if corrected:
            for before in self._folder.correct(corrected):
                self.counts.count_outcome(before, -1)
                self.counts.count_outcome(None, 1)

    def refuse(self, refusal: Refusal) -> None:
        """Count a refusal, and list it while the list is short enough to be read."""
        self.counts.refused += 1
        self.reasons[refusal.reason] += 1
        if len(self.refusals) < _NUM_REFUSALS_LISTED:
            self.refusals.append(refusal)

    def _refuse(self, entry: FileEntry, line: int | None, reason: str, detail: str) -> None:
        entry.refused += 1
        self.refuse(Refusal(file=entry.path, line=line, reason=reason, detail=detail))


def _stem(path: str) -> str:
    name = os.path.basename(path)
    stem, suffix = os.path.splitext(name)
    while suffix.lower() in _STEM_SUFFIXES and stem:
        name = stem
        stem, suffix = os.path.splitext(name)
    return name


def _manifest(
    run: _Ingest,
    inputs: Sequence[str],
    label_inputs: Sequence[str],
    labels: tuple[list[LabelFile], LabelCounts],
) -> Manifest:
    return Manifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        traceforge=__version__,
        inputs=[shown_path(each) for each in inputs],
        label_inputs=[shown_path(each) for each in label_inputs],
        counts=run.counts,
        formats=by_count(run.formats),
        notes=by_count(run.notes),
        refusals_by_reason=by_count(run.reasons),
        refusals=run.refusals,
        refusals_not_listed=run.counts.refused - len(run.refusals),
        ways_out={reason: WAYS_OUT[reason] for reason in by_count(run.reasons)},
        files=run.files,
        label_files=labels[0],
        labels=labels[1],
    )


def _nothing_usable(run: _Ingest) -> InputError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in by_count(run.reasons).items())
    lines = [f"no usable trajectory in {run.counts.files} files"]
    if run.counts.side_files:
        lines[0] += f", of which {run.counts.side_files} hold labels or predictions"
    if reasons:
        lines[0] += f": {reasons}"
    for refusal in run.refusals[:_NUM_REFUSALS_SHOWN]:
        place = refusal.file if refusal.line is None else f"{refusal.file}:{refusal.line}"
        lines.append(f"  {place}: {refusal.reason}: {refusal.detail}")
    if run.counts.refused > _NUM_REFUSALS_SHOWN:
        lines.append(f"  and {run.counts.refused - _NUM_REFUSALS_SHOWN} more")
    first = next(iter(by_count(run.reasons)), None)
    hint = "pass the agent's logs; label files go to --labels" if first is None else WAYS_OUT[first]
    return InputError("\n".join(lines), hint=hint)
