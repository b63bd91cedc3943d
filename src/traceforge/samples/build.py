"""`traceforge build sft`: which turns of which trajectories are samples, as references and without any model.

Files    `trajectories.jsonl` (copied byte for byte), `sft.jsonl` (one reference a line), `manifest.json`, and with
         `as_trl` also `trl.jsonl` (standard conversational prompt-completion rows, one a reference, quadratic in size).
Flat     Trajectories are read one at a time; what stays in memory is one id per trajectory and per refusal.
Same     The same input gives the same bytes: the files hold no time and no absolute path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from traceforge import __version__
from traceforge.errors import InputError
from traceforge.folders import MANIFEST, FolderWriter, HashedFile
from traceforge.hashes import file_sha256
from traceforge.samples.references import REFERENCES, SCHEMA, SampleReference, encode_reference
from traceforge.samples.trl_rows import UnparsableArgumentsError, trl_row
from traceforge.samples.turns import trained_turns
from traceforge.trajectories.manifest import SCHEMA_VERSION as INGEST_SCHEMA
from traceforge.trajectories.output import TRAJECTORIES
from traceforge.trajectories.record import Message, Trajectory, read_trajectories

TRL_ROWS = "trl.jsonl"
_CHUNK_BYTES = 1 << 20


class Refused(msgspec.Struct):
    """What was left out for one reason. `ids` are sample ids (`unit = "turn"`) or trajectory ids (`"trajectory"`)."""

    unit: str
    count: int = 0
    turns: int = 0
    ids: list[str] = msgspec.field(default_factory=list)

    def add(self, identifier: str, *, turns: int) -> None:
        """Count one more."""
        self.count += 1
        self.turns += turns
        self.ids.append(identifier)


class BuildSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What `build_sft` read, wrote and refused."""

    output: str
    trajectories: int
    tasks: int
    turns: int
    samples: int
    refusals: dict[str, Refused]
    trl_rows: int | None
    trl_refusals: dict[str, Refused]

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def describe(self) -> str:
        """Return the counts in a few lines for a person."""
        lines = [
            f"{self.samples:,} samples of {self.tasks:,} tasks, from {self.turns:,} assistant turns in "
            f"{self.trajectories:,} trajectories: {self.output}"
        ]
        if self.refusals:
            lines.append(f"refused: {_describe(self.refusals)}")
        if self.trl_rows is not None:
            refused = f"; refused: {_describe(self.trl_refusals)}" if self.trl_refusals else ""
            lines.append(f"{self.trl_rows:,} rows in {TRL_ROWS}{refused}")
        return "\n".join(lines)


class _Selection:
    """Decides turn by turn, and counts."""

    def __init__(self, *, only_resolved: bool) -> None:
        self._only_resolved = only_resolved
        self.refusals: dict[str, Refused] = {}
        self.trl_refusals: dict[str, Refused] = {}
        self.tasks: set[str] = set()
        self.num_trajectories = 0
        self.num_turns = 0
        self.num_samples = 0
        self.num_trl_rows = 0

    def references(self, trajectory: Trajectory) -> Iterator[SampleReference]:
        """Yield the trajectory's samples; count everything else with its reason."""
        turns = trajectory.turns()
        self.num_trajectories += 1
        self.num_turns += len(turns)
        whole = self._reason_to_refuse(trajectory)
        if whole is not None:
            _count(self.refusals, whole, trajectory.trajectory_id, unit="trajectory", turns=len(turns))
            return
        trained = set(trained_turns(trajectory))
        for turn, message_index in enumerate(turns):
            sample_id = f"{trajectory.trajectory_id}#{turn}"
            reason = _reason_untrained(trajectory.messages[message_index], trained=message_index in trained)
            if reason is not None:
                _count(self.refusals, reason, sample_id, unit="turn", turns=1)
                continue
            self.num_samples += 1
            self.tasks.add(trajectory.task_id)
            yield SampleReference(
                sample_id=sample_id,
                trajectory_id=trajectory.trajectory_id,
                task_id=trajectory.task_id,
                turn=turn,
                message_index=message_index,
            )

    def trl_line(self, trajectory: Trajectory, reference: SampleReference) -> bytes | None:
        """Return the reference as a row for TRL, or None (counted) where TRL's format cannot hold it."""
        try:
            row = trl_row(trajectory, reference.message_index)
        except UnparsableArgumentsError:
            _count(self.trl_refusals, "arguments_not_json", reference.sample_id, unit="turn", turns=1)
            return None
        self.num_trl_rows += 1
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"

    def _reason_to_refuse(self, trajectory: Trajectory) -> str | None:
        if not trajectory.turns():
            return "no_assistant_turn"
        if self._only_resolved and trajectory.outcome.resolved is None:
            return "outcome_unknown"
        if self._only_resolved and not trajectory.outcome.resolved:
            return "not_resolved"
        return None


def build_sft(source: Path, output: Path, *, only_resolved: bool = False, as_trl: bool = False) -> BuildSummary:
    """Write a data set of one sample per trained assistant turn, and return what was kept and refused.

    Args:
        source: a folder made by `traceforge ingest`, or a `trajectories.jsonl`.
        output: the folder to write; an earlier build there is replaced.
        only_resolved: keep only trajectories whose outcome says resolved; unknown outcomes are refused too.
        as_trl: also write `trl.jsonl`.

    Raises:
        InputError: the source cannot be read, two trajectories share an id, the output is not a place for a build,
            or no turn is left; the message counts the refusals.
        StorageError: writing failed; nothing half-written is left.
    """
    trajectories = source / TRAJECTORIES if source.is_dir() else source
    _check_places(source, trajectories, output)
    selection = _Selection(only_resolved=only_resolved)
    with FolderWriter(output) as writer:
        copied_hash = _copy(trajectories, writer.file(TRAJECTORIES))
        check_ingest(source, trajectories, copied_hash)
        references = writer.file(REFERENCES)
        trl_file = writer.file(TRL_ROWS) if as_trl else None
        for trajectory in _read_unique(trajectories):
            for reference in selection.references(trajectory):
                references.write(encode_reference(reference) + b"\n")
                line = selection.trl_line(trajectory, reference) if trl_file is not None else None
                if trl_file is not None and line is not None:
                    trl_file.write(line)
        if selection.num_samples == 0:
            raise _nothing_left(trajectories, selection)
        inputs = [{"file": trajectories.name, "sha256": copied_hash}]
        ingest_manifest = trajectories.with_name(MANIFEST)
        if ingest_manifest.is_file():
            inputs.append({"file": MANIFEST, "sha256": file_sha256(ingest_manifest)})
        manifest = _manifest(selection, inputs, only_resolved=only_resolved, as_trl=as_trl)
        writer.commit(manifest, stale=() if as_trl else (TRL_ROWS,))
    return BuildSummary(
        output=str(output),
        trajectories=selection.num_trajectories,
        tasks=len(selection.tasks),
        turns=selection.num_turns,
        samples=selection.num_samples,
        refusals=dict(sorted(selection.refusals.items())),
        trl_rows=selection.num_trl_rows if as_trl else None,
        trl_refusals=selection.trl_refusals,
    )


def _check_places(source: Path, trajectories: Path, output: Path) -> None:
    if not trajectories.is_file():
        missing = f"{source}: no {TRAJECTORIES} in this folder" if source.is_dir() else f"{source}: no such file"
        raise InputError(missing, hint="run `traceforge ingest LOGS -o FOLDER` first and pass FOLDER")
    check_output(output, source=trajectories.parent, schema=SCHEMA, command="build sft")


def check_output(output: Path, *, source: Path | None, schema: str, command: str) -> None:
    """Refuse an output that is no place for a build.

    Args:
        output: the folder to write.
        source: the folder that is read, if one is.
        schema: of the manifest that an earlier build of this kind has.
        command: the verb, for messages.

    Raises:
        InputError: it is a file, the source itself, or a folder that holds something else.
    """
    if output.exists() and not output.is_dir():
        raise InputError(f"{output}: is a file; the output of `{command}` is a folder")
    if source is not None and output.resolve() == source.resolve():
        raise InputError(
            f"{output}: output and source are the same folder, and the source would be overwritten",
            hint="choose another output folder with -o",
        )
    manifest = output / MANIFEST
    found = _read_manifest(manifest).get("schema_version")
    if manifest.exists() and found != schema:
        raise InputError(
            f"{manifest}: this folder holds something else than a build (schema {found!r})",
            hint="choose another output folder with -o",
        )


def check_ingest(source: Path, trajectories: Path, found_hash: str) -> None:
    """Refuse an ingest folder whose trajectories are not those its manifest vouches for.

    Raises:
        InputError: the folder is of another kind, or the file was changed after it was ingested.
    """
    manifest = _read_manifest(source / MANIFEST)
    schema = manifest.get("schema_version")
    if source.is_dir() and schema is not None and schema != INGEST_SCHEMA:
        raise InputError(
            f"{source}: holds something else than an ingest (schema {schema!r})",
            hint="pass the folder made by `traceforge ingest`; one made by `build` is ready to train on",
        )
    if not source.is_dir() or schema is None:
        return
    expected = manifest.get("outputs", {}).get(TRAJECTORIES, {}).get("sha256")
    if expected != found_hash:
        raise InputError(
            f"{trajectories}: sha256 {found_hash[:12]}… is not the {str(expected)[:12]}… that {MANIFEST} names; "
            "the file was changed after it was ingested",
            hint=f"ingest again, or, if the change is meant, pass the file itself: {trajectories}",
        )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def _copy(trajectories: Path, target: HashedFile) -> str:
    digest = hashlib.sha256()
    try:
        handle = trajectories.open("rb")
    except OSError as error:
        raise InputError(f"{trajectories}: cannot read trajectories: {error.strerror}") from error
    with handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
            target.write(chunk)
    return digest.hexdigest()


def _read_unique(trajectories: Path) -> Iterator[Trajectory]:
    seen: set[str] = set()
    for trajectory in read_trajectories(trajectories):
        if trajectory.trajectory_id in seen:
            raise InputError(
                f"{trajectories}: two trajectories have the id {trajectory.trajectory_id!r}; sample ids would collide",
                hint="ingest the logs again into one folder; ingesting gives every trajectory an id of its own",
            )
        seen.add(trajectory.trajectory_id)
        yield trajectory


def _reason_untrained(message: Message, *, trained: bool) -> str | None:
    if not trained:
        return "flagged_untrained"
    if not (message.content.strip() or (message.reasoning or "").strip() or message.tool_calls):
        return "empty_turn"
    return None


def _count(refusals: dict[str, Refused], reason: str, identifier: str, *, unit: str, turns: int) -> None:
    refusals.setdefault(reason, Refused(unit=unit)).add(identifier, turns=turns)


def _manifest(
    selection: _Selection, inputs: list[dict[str, str]], *, only_resolved: bool, as_trl: bool
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA,
        "traceforge": __version__,
        "settings": {"only_resolved": only_resolved, "as_trl": as_trl},
        "inputs": inputs,
        "counts": {
            "trajectories": selection.num_trajectories,
            "tasks": len(selection.tasks),
            "turns": selection.num_turns,
            "samples": selection.num_samples,
            **({"trl_rows": selection.num_trl_rows} if as_trl else {}),
        },
        "refusals": msgspec.to_builtins(dict(sorted(selection.refusals.items()))),
        **({"trl_refusals": msgspec.to_builtins(selection.trl_refusals)} if as_trl else {}),
    }


def _nothing_left(trajectories: Path, selection: _Selection) -> InputError:
    if selection.num_trajectories == 0:
        return InputError(f"{trajectories}: holds no trajectory", hint="ingest logs that hold at least one agent run")
    ways = {
        "outcome_unknown": "give outcomes with `traceforge ingest --labels`, or build without --only-resolved",
        "not_resolved": "build without --only-resolved",
        "flagged_untrained": "the log's own flags say that no turn is to be trained",
    }
    hint = next((way for reason, way in ways.items() if reason in selection.refusals), None)
    return InputError(
        f"{trajectories}: no sample is left of {selection.num_trajectories} trajectories "
        f"with {selection.num_turns} assistant turns; refused: {_describe(selection.refusals)}",
        hint=hint,
    )


def _describe(refusals: dict[str, Refused]) -> str:
    return ", ".join(
        f"{reason} {refused.count:,} "
        + (f"trajectories ({refused.turns:,} turns)" if refused.unit == "trajectory" else "turns")
        for reason, refused in sorted(refusals.items())
    )
