"""A run folder read back: what its files hold, which are missing, and which ended in a torn line.

Tolerated  A missing file (a failed or killed run has fewer), and a last line without its newline: a crash in the
           middle of a write. Both are counted, neither is guessed at.
Refused    Everything else that is not what the recorder writes, by file, line and field.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from traceforge.errors import InputError
from traceforge.evidence.schema import SCHEMA_VERSION, Evidence

RUN_FILES = ("run.json", "manifest.json", "updates.jsonl", "evaluations.jsonl", "samples.json", "evidence.json")


class PreferenceMeans(msgspec.Struct, frozen=True, kw_only=True):
    """What preference objectives log beside the loss, as means over pairs; None in an SFT run."""

    margin: float | None = None
    """Chosen reward less rejected reward."""
    accuracy: float | None = None
    """Share of the pairs whose margin is above 0."""
    chosen_logp: float | None = None
    """Mean log-probability per trained token of the chosen side, in nats."""
    rejected_logp: float | None = None
    chosen_length: float | None = None
    """Trained tokens (their weights) of the chosen side."""
    rejected_length: float | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None


class UpdateLine(PreferenceMeans, frozen=True):
    """One line of updates.jsonl. None = the number was not finite (or, for `peak_bytes`, not measured)."""

    update: int
    """Counts from 1."""
    micro_batches: int
    samples: int
    trained_tokens: int
    row_tokens: int
    loss: float | None
    learning_rate: float | None
    gradient_norm: float | None
    seconds: float | None
    tokens_per_s: float | None
    peak_bytes: int | None
    skipped: bool


class EvaluationLine(PreferenceMeans, frozen=True):
    """One line of evaluations.jsonl. `update` 0 is before the first update; `set` is `train` or `evaluation`."""

    update: int
    set: str
    loss: float | None
    trained_tokens: int
    rows: int
    rows_without_targets: int


@dataclass(frozen=True)
class RunRecord:
    """All that a run folder holds.

    Args:
        folder: where it lies.
        config: run.json, or None.
        manifest: manifest.json, or None.
        updates: lines of updates.jsonl, skipped ones included, in order.
        evaluations: lines of evaluations.jsonl, in order.
        samples: samples.json: samples with their masks.
        evidence: evidence.json, or None: the run was killed, or is still going on.
        missing_files: those of `RUN_FILES` that are not there.
        torn_lines: per file, unfinished last lines that were left out.
    """

    folder: Path
    config: dict[str, Any] | None = None
    manifest: dict[str, Any] | None = None
    updates: tuple[UpdateLine, ...] = ()
    evaluations: tuple[EvaluationLine, ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    evidence: Evidence | None = None
    missing_files: tuple[str, ...] = ()
    torn_lines: dict[str, int] = field(default_factory=dict)

    @property
    def applied_updates(self) -> list[UpdateLine]:
        """Updates that changed the weights."""
        return [line for line in self.updates if not line.skipped]

    @property
    def skipped_updates(self) -> list[UpdateLine]:
        """Updates whose gradient was not finite."""
        return [line for line in self.updates if line.skipped]


def load_run(folder: Path) -> RunRecord:
    """Return what the run folder holds.

    Raises:
        InputError: the folder is missing or is no run folder, or a file in it is not what a run writes.
    """
    missing = tuple(name for name in RUN_FILES if not (folder / name).is_file())
    if len(missing) == len(RUN_FILES) or _is_other_folder(folder, missing):
        what = "holds none of the files of a run" if folder.is_dir() else "no such folder"
        raise InputError(f"{folder}: {what}", hint="give the folder that `traceforge train` printed, such as runs/demo")
    torn: dict[str, int] = {}
    return RunRecord(
        folder=folder,
        config=_read_object(folder / "run.json"),
        manifest=_read_object(folder / "manifest.json"),
        updates=_read_lines(folder / "updates.jsonl", UpdateLine, torn),
        evaluations=_read_lines(folder / "evaluations.jsonl", EvaluationLine, torn),
        samples=_read_samples(folder / "samples.json"),
        evidence=read_evidence(folder / "evidence.json") if "evidence.json" not in missing else None,
        missing_files=missing,
        torn_lines=torn,
    )


def _is_other_folder(folder: Path, missing: tuple[str, ...]) -> bool:
    """Return whether all that is there is the manifest of an ingest or a build."""
    if len(missing) < len(RUN_FILES) - 1 or "manifest.json" in missing:
        return False
    schema = (_read_object(folder / "manifest.json") or {}).get("schema_version")
    return isinstance(schema, str) and not schema.startswith("traceforge-run/")


def read_evidence(path: Path) -> Evidence:
    """Return the evidence in `path`.

    Raises:
        InputError: it cannot be read, is of another schema version, or a field is wrong; the message names it.
    """
    raw = _read_json(path)
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise InputError(f"{path}: schema_version is {version!r}, this version reads {SCHEMA_VERSION!r}")
    try:
        return Evidence.model_validate(raw)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc'])) or 'evidence'}: {each['msg']}" for each in error.errors()]
        raise InputError(f"{path}: not valid evidence: {'; '.join(problems)}") from error


_Line = TypeVar("_Line", UpdateLine, EvaluationLine)


def _read_lines(path: Path, line_type: type[_Line], torn: dict[str, int]) -> tuple[_Line, ...]:
    if not path.is_file():
        return ()
    decoder = msgspec.json.Decoder(line_type)
    lines: list[_Line] = []
    with _open(path) as handle:
        for number, text in enumerate(handle, start=1):
            if not text.endswith(b"\n"):
                torn[path.name] = 1
                break
            try:
                lines.append(decoder.decode(text))
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise InputError(f"{path}:{number}: not a line that a run writes: {error}") from error
    return tuple(lines)


def _read_samples(path: Path) -> tuple[dict[str, Any], ...]:
    if not path.is_file():
        return ()
    samples = _read_json(path)
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise InputError(f"{path}: expected a list of samples")
    return tuple(samples)


def _read_object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    value = _read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object")
    return value


def _read_json(path: Path) -> Any:
    with _open(path) as handle:
        try:
            return json.loads(handle.read())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not JSON: {error}") from error


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}") from error
