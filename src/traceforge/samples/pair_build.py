"""`traceforge build pairs`: preference pairs as references, without any model.

Files    `trajectories.jsonl` (each side as a record; a run that several pairs name stands there once), `pairs.jsonl`
         (one reference a line), `manifest.json`, and with `as_trl` also `trl.jsonl` (TRL's preference rows).
Flat     Rows are read one at a time; what stays in memory is one reference a pair and 16 bytes of its hash.
Same     The same input gives the same bytes: the files hold no time and no absolute path.
Tasks    Pairs of one prompt, and pairs of runs that share one, are one task: the split never parts them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from traceforge import __version__
from traceforge.errors import InputError
from traceforge.folders import FolderWriter, HashedFile
from traceforge.samples.build import check_output
from traceforge.samples.pair_references import COMMAND, PAIR_SCHEMA, PairReference, encode_pair_reference
from traceforge.samples.pair_sides import WAYS_OUT, PairSide, is_empty
from traceforge.samples.pair_sources import PairDraft, RefusedPair, read_explicit, read_rows
from traceforge.samples.pair_tasks import TaskNames
from traceforge.samples.references import PAIRS
from traceforge.samples.trl_rows import UnparsableArgumentsError, trl_pair_row
from traceforge.trajectories.output import TRAJECTORIES
from traceforge.trajectories.record import encode
from traceforge.trajectories.refusals import WAYS_OUT as MESSAGE_WAYS_OUT

TRL_ROWS = "trl.jsonl"
_NUM_REFUSALS_LISTED = 10_000


class PairBuildSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What `build_pairs` read, wrote and refused.

    Args:
        output: the folder.
        rows: everything that was looked at; `pairs` and all refusals add up to it.
        pairs: references written.
        tasks: distinct tasks of them.
        groups: distinct groups of them.
        trajectories: records written.
        synthetic: the texts are random words.
        refusals: rows that gave no pair, by reason.
        first_refused: the first one of each reason.
        notes: what was repaired, left unread, or left out of a side without refusing the pair.
        trl_rows: rows of `trl.jsonl`; None unless they were asked for.
        trl_refusals: pairs that TRL's format cannot hold, by reason.
    """

    output: str
    rows: int
    pairs: int
    tasks: int
    groups: int
    trajectories: int
    synthetic: bool
    refusals: dict[str, int]
    first_refused: dict[str, RefusedPair]
    notes: dict[str, int]
    trl_rows: int | None
    trl_refusals: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def describe(self) -> str:
        """Return the counts in a few lines for a person."""
        what = "synthetic pairs" if self.synthetic else "pairs"
        lines = [
            f"{self.pairs:,} {what} of {self.tasks:,} tasks in {self.groups:,} groups, of {self.rows:,} looked at: "
            f"{self.output}"
        ]
        if self.refusals:
            lines.append(f"refused: {_counted(self.refusals)}")
            lines += [f"  {code}: {first.place}: {first.detail}" for code, first in self.first_refused.items()]
        if self.notes:
            lines.append(f"noted: {_counted(self.notes)}")
        if self.trl_rows is not None:
            refused = f"; refused: {_counted(self.trl_refusals)}" if self.trl_refusals else ""
            lines.append(f"{self.trl_rows:,} rows in {TRL_ROWS}{refused}")
        return "\n".join(lines)


def build_pairs(source: Path, output: Path, *, explicit: Sequence[str] = (), as_trl: bool = False) -> PairBuildSummary:
    """Write a data set of preference pairs, and return what was kept and refused.

    Args:
        source: a `.jsonl` or `.json` file of preference rows; or, with `explicit`, a folder made by `traceforge ingest`
            or a `trajectories.jsonl`.
        output: the folder to write; an earlier build of pairs there is replaced.
        explicit: pairs of ingested trajectories or turns: `A|B` with the ids of the chosen and the rejected one, or
            files with one pair a line (`explicit_pairs.py`).
        as_trl: also write `trl.jsonl`.

    Raises:
        InputError: the source cannot be read or is of no known form, the output is not a place for a build, or no pair
            is left; the message counts the refusals.
        StorageError: writing failed; nothing half-written is left.
    """
    if source.is_dir() and not explicit:
        raise InputError(
            f"{source}: is a folder; which of its trajectories are pairs must be said",
            hint="name them with --pair 'CHOSEN|REJECTED' or --pair PAIRS.jsonl, or pass a file of preference rows",
        )
    check_output(output, source=source if source.is_dir() else source.parent, schema=PAIR_SCHEMA, command=COMMAND)
    inputs: list[dict[str, str]] = []
    notes: Counter[str] = Counter()
    if explicit:
        drafts = read_explicit(source, explicit, inputs=inputs, notes=notes)
    else:
        drafts = read_rows(source, inputs=inputs, notes=notes)
    settings = {"explicit": bool(explicit), "as_trl": as_trl}
    return write_pairs(drafts, output, settings=settings, inputs=inputs, notes=notes)


def write_pairs(
    drafts: Iterable[PairDraft | RefusedPair],
    output: Path,
    *,
    settings: dict[str, Any],
    inputs: list[dict[str, str]],
    notes: Counter[str],
) -> PairBuildSummary:
    """Write drafts as a built folder, and return what was kept and refused.

    Args:
        drafts: drawn one at a time.
        output: see `build_pairs`.
        settings: for the manifest; `as_trl` and `synthetic` are read.
        inputs: names and hashes for the manifest; complete when the last draft was drawn.
        notes: counts for the manifest; the same.

    Raises:
        InputError: no pair is left.
        StorageError: writing failed; nothing half-written is left.
    """
    as_trl = bool(settings.get("as_trl"))
    build = _Build(notes)
    with FolderWriter(output) as writer:
        records, pairs = writer.file(TRAJECTORIES), writer.file(PAIRS)
        trl_file = writer.file(TRL_ROWS) if as_trl else None
        for draft in drafts:
            build.add(draft, records, trl_file)
        if not build.references:
            raise _nothing_left(build, inputs)
        references = build.finished()
        for reference in references:
            pairs.write(encode_pair_reference(reference) + b"\n")
        summary = PairBuildSummary(
            output=str(output),
            rows=build.num_rows,
            pairs=len(references),
            tasks=len({reference.task_id for reference in references}),
            groups=len({reference.group for reference in references}),
            trajectories=len(build.written),
            synthetic=bool(settings.get("synthetic")),
            refusals=dict(sorted(build.refusals.items())),
            first_refused=dict(sorted(build.first_refused.items())),
            notes=dict(sorted(notes.items())),
            trl_rows=build.num_trl_rows if as_trl else None,
            trl_refusals=dict(build.trl_refusals),
        )
        writer.commit(_manifest(summary, build.listed, settings, inputs), stale=() if as_trl else (TRL_ROWS,))
    return summary


class _Build:
    """The state of one build."""

    def __init__(self, notes: Counter[str]) -> None:
        self.notes = notes
        self.references: list[PairReference] = []
        self.written: set[str] = set()
        self.refusals: Counter[str] = Counter()
        self.trl_refusals: Counter[str] = Counter()
        self.first_refused: dict[str, RefusedPair] = {}
        self.listed: list[RefusedPair] = []
        self.num_rows = 0
        self.num_trl_rows = 0
        self._tasks = TaskNames()
        self._seen: dict[bytes, str] = {}

    def add(self, draft: PairDraft | RefusedPair, records: HashedFile, trl_file: HashedFile | None) -> None:
        """Write the records of a pair and keep its reference, or count why not."""
        self.num_rows += 1
        if isinstance(draft, RefusedPair):
            self._refuse(draft)
            return
        chosen, rejected = draft.chosen, draft.rejected
        prompt = chosen.messages[: draft.prompt_messages]
        endings = [side.messages[draft.prompt_messages :] for side in (chosen, rejected)]
        digest = _digest(prompt, *endings, chosen.trajectory.tools)
        pair_id = f"{chosen.side_id}|{rejected.side_id}"
        if digest in self._seen:
            self._refuse(RefusedPair(draft.place, "duplicate", f"the same prompt and sides as {self._seen[digest]!r}"))
            return
        self._seen[digest] = pair_id
        for side in (chosen, rejected):
            self._write_record(side, records)
        self._note_left_out(draft)
        prompt_digest = _digest(prompt, chosen.trajectory.tools)
        self.references.append(
            PairReference(
                pair_id=pair_id,
                chosen=chosen.trajectory.trajectory_id,
                rejected=rejected.trajectory.trajectory_id,
                prompt_messages=draft.prompt_messages,
                chosen_messages=chosen.stop,
                rejected_messages=rejected.stop,
                task_id=self._tasks.add(draft.tasks, prompt=prompt_digest, stated=draft.states_tasks),
                group=draft.group if draft.group is not None else pair_id,
            )
        )
        if trl_file is not None:
            self._write_trl_row(draft, trl_file)

    def finished(self) -> list[PairReference]:
        """Return the references, now that every task has its name."""
        if self._tasks.num_joined:
            self.notes["tasks_joined"] += self._tasks.num_joined
        return [
            msgspec.structs.replace(reference, task_id=self._tasks.name(reference.task_id))
            for reference in self.references
        ]

    def _write_record(self, side: PairSide, records: HashedFile) -> None:
        if side.trajectory.trajectory_id not in self.written:
            records.write(encode(side.trajectory) + b"\n")
            self.written.add(side.trajectory.trajectory_id)

    def _note_left_out(self, draft: PairDraft) -> None:
        for side in (draft.chosen, draft.rejected):
            for message in side.messages[draft.prompt_messages :]:
                if message.role == "assistant":
                    self.notes["turns_flagged_untrained"] += message.trained is False
                    self.notes["turns_empty"] += message.trained is not False and is_empty(message)
        for name in ("turns_flagged_untrained", "turns_empty"):
            if not self.notes[name]:
                del self.notes[name]

    def _write_trl_row(self, draft: PairDraft, trl_file: HashedFile) -> None:
        sides = [
            msgspec.structs.replace(side.trajectory, messages=side.messages) for side in (draft.chosen, draft.rejected)
        ]
        try:
            row = trl_pair_row(sides[0], sides[1], draft.prompt_messages)
        except UnparsableArgumentsError:
            self.trl_refusals["arguments_not_json"] += 1
            return
        self.num_trl_rows += 1
        trl_file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def _refuse(self, refused: RefusedPair) -> None:
        self.refusals[refused.reason] += 1
        self.first_refused.setdefault(refused.reason, refused)
        if len(self.listed) < _NUM_REFUSALS_LISTED:
            self.listed.append(refused)


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(msgspec.json.encode(parts)).digest()[:16]


def _manifest(
    summary: PairBuildSummary, listed: list[RefusedPair], settings: dict[str, Any], inputs: list[dict[str, str]]
) -> dict[str, Any]:
    ways_out = {**MESSAGE_WAYS_OUT, **WAYS_OUT}
    return {
        "schema_version": PAIR_SCHEMA,
        "traceforge": __version__,
        "settings": settings,
        "inputs": inputs,
        "counts": {
            name: getattr(summary, name)
            for name in ("rows", "pairs", "tasks", "groups", "trajectories", "trl_rows")
            if getattr(summary, name) is not None
        },
        "notes": summary.notes,
        "refusals": summary.refusals,
        "refused_rows": msgspec.to_builtins(listed),
        "refused_rows_not_listed": sum(summary.refusals.values()) - len(listed),
        "ways_out": {code: ways_out[code] for code in summary.refusals if code in ways_out},
        **({"trl_refusals": summary.trl_refusals} if summary.trl_rows is not None else {}),
    }


def _nothing_left(build: _Build, inputs: list[dict[str, str]]) -> InputError:
    where = inputs[-1]["file"] if inputs else "the source"
    if build.num_rows == 0:
        return InputError(f"{where}: holds no pair")
    firsts = "; ".join(
        f"{code} {count:,} (first: {build.first_refused[code].place}: {build.first_refused[code].detail})"
        for code, count in build.refusals.most_common()
    )
    ways_out = {**MESSAGE_WAYS_OUT, **WAYS_OUT}
    hint = next((ways_out[code] for code, _ in build.refusals.most_common() if code in ways_out), None)
    return InputError(f"{where}: no pair is left of {build.num_rows:,}; refused: {firsts}", hint=hint)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
