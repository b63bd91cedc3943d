"""The run folder while a run writes it: configuration, manifest, updates, evaluations, samples, log, evidence.

Files    run.json, manifest.json, updates.jsonl, evaluations.jsonl, samples.json, logs/rank{n}.log, evidence.json.
Never    overwrites another run: `create_run_folder` takes the next free name.
Full disk  A reserve of 1 MiB is set aside when a run starts and given back before evidence is written, so a run
         whose disk filled up can still say so. If even that is too little, the losses of single updates are left out
         of evidence.json (updates.jsonl has them), and a note in it says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypedDict

import msgspec

from traceforge.errors import StorageError
from traceforge.evidence.run_record import EvaluationLine, RunRecord, UpdateLine, load_run
from traceforge.evidence.schema import Evidence
from traceforge.evidence.storage import LineFile, encode, finite_or_null, storage_error, to_json, write_whole

__all__ = ["EvaluationLine", "RunRecord", "RunRecorder", "SampleView", "UpdateLine", "create_run_folder", "load_run"]

UPDATE_FIELDS, EVALUATION_FIELDS = (
    frozenset(field.name for field in msgspec.structs.fields(line) if field.required)
    for line in (UpdateLine, EvaluationLine)
)

_RESERVE_BYTES = 1 << 20
_RESERVE_NAME = ".reserve-for-evidence"


class SampleView(TypedDict):
    """One sample for the report's mask view: its text in runs of one weight."""

    sample_id: str
    set: str
    num_tokens: int
    trained_tokens: int
    segments: Sequence[Mapping[str, Any]]
    """`{"text": str, "trained": bool, "weight": float}` each, in order."""


def create_run_folder(output_dir: Path, run_name: str) -> Path:
    """Create and return `output_dir/run_name`, or the first free of `run_name-2`, `run_name-3`, ...

    Making the folder is what claims the name, so two runs that start together get two folders.

    Raises:
        StorageError: the folder cannot be made.
    """
    number = 1
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(output_dir, error) from error
    while True:
        folder = output_dir / (run_name if number == 1 else f"{run_name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise storage_error(folder, error) from error
        else:
            return folder


class RunRecorder:
    """Writes the files of one run folder. Every rank makes the same calls; only rank 0 writes more than its log.

    Every method but `log` raises `StorageError`, naming the file, when it cannot write. Safe to call from threads.
    """

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        """Open `folder`, which exists; lines are added to what an earlier part of the run wrote.

        Raises:
            StorageError: the folder cannot be written, or its disk has no room for the reserve.
        """
        self.folder = folder
        self._is_first = rank == 0
        self._lock = threading.RLock()  # a signal handler may log while a line is being written
        self._updates = LineFile(folder / "updates.jsonl")
        self._evaluations = LineFile(folder / "evaluations.jsonl")
        self._log = LineFile(folder / "logs" / f"rank{rank}.log")
        self._lost_log_lines = 0
        self._reserve = folder / _RESERVE_NAME
        try:
            self._log.path.parent.mkdir(parents=True, exist_ok=True)
            if self._is_first:
                self._set_aside()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._reserve.unlink(missing_ok=True)
            raise storage_error(folder, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_config(self, config: str | Mapping[str, Any]) -> None:
        """Write run.json, the resolved configuration, given as JSON text or as plain values."""
        values = json.loads(config) if isinstance(config, str) else config
        self._write("run.json", to_json(values, indent=2))

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write manifest.json: versions, revisions, hashes, and under `dataset` the statistics with every drop."""
        self._write("manifest.json", to_json(manifest, indent=2))

    def write_samples(self, samples: Sequence[SampleView | Mapping[str, Any]]) -> None:
        """Write samples.json, the few samples whose masks the report shows."""
        clean, _ = finite_or_null(list(samples))
        self._write("samples.json", encode(clean, indent=1))

    def update(self, record: Mapping[str, Any]) -> None:
        """Add a line to updates.jsonl.

        `skipped` is True for an update whose gradient was not finite: `update` is then the number that it would have
        had, and the next line has the same one. Fields beyond the fixed ones are kept.
        """
        missing = UPDATE_FIELDS - record.keys()
        assert not missing, f"updates.jsonl needs {sorted(missing)}"
        self._append(self._updates, to_json(record))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Add a line to evaluations.jsonl. Fields beyond the fixed ones are kept."""
        missing = EVALUATION_FIELDS - record.keys()
        assert not missing, f"evaluations.jsonl needs {sorted(missing)}"
        self._append(self._evaluations, to_json(record))

    def log(self, text: str) -> None:
        """Add `text`, each line with the time (UTC), to the rank's log. Never raises; evidence notes lost lines."""
        moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        for line in text.splitlines() or [""]:
            try:
                with self._lock:
                    self._log.append(f"{moment} {line}".encode(errors="replace"))
            except StorageError:
                self._lost_log_lines += 1

    def write_evidence(self, evidence: Evidence) -> Path:
        """Write evidence.json and return its path.

        Raises:
            StorageError: it cannot be written, not even in its smaller form; an earlier one stands as it was.
        """
        path = self.folder / "evidence.json"
        if not self._is_first:
            return path
        with contextlib.suppress(OSError):
            self._reserve.unlink(missing_ok=True)
        if self._lost_log_lines:
            name = self._log.path.relative_to(self.folder)
            lost = f"log lines that could not be written to {name}: {self._lost_log_lines}"
            evidence = evidence.model_copy(update={"notes": (*evidence.notes, lost)})
        try:
            write_whole(path, to_json(evidence.model_dump(mode="json"), indent=2) + b"\n")
        except StorageError as error:
            self._write_smaller(path, evidence, error)
        return path

    def close(self) -> None:
        """Close the files and give the reserve back."""
        with self._lock:
            for file in (self._updates, self._evaluations, self._log):
                file.close()
        if self._is_first:
            with contextlib.suppress(OSError):
                self._reserve.unlink(missing_ok=True)

    def _write(self, name: str, content: bytes) -> None:
        if self._is_first:
            write_whole(self.folder / name, content + b"\n")

    def _append(self, file: LineFile, line: bytes) -> None:
        if not self._is_first:
            return
        with self._lock:
            removed = file.append(line)
        if removed:
            self.log(f"{file.path.name}: removed {removed} bytes of a line that an earlier end left torn")

    def _write_smaller(self, path: Path, evidence: Evidence, error: StorageError) -> None:
        note = f"candidate.update_losses was left out, updates.jsonl has them: {error.message}"
        candidate = evidence.candidate.model_copy(update={"update_losses": ()})
        smaller = evidence.model_copy(update={"candidate": candidate, "notes": (*evidence.notes, note)})
        write_whole(path, to_json(smaller.model_dump(mode="json")) + b"\n")

    def _set_aside(self) -> None:
        # Zeros may be stored as a hole; random bytes take real blocks on every file system.
        with self._reserve.open("wb") as handle:
            handle.write(os.urandom(_RESERVE_BYTES))
            handle.flush()
            os.fsync(handle.fileno())
