"""The folder an ingest writes: `trajectories.jsonl` and `manifest.json`, both whole or not there.

Whole    Both are written under temporary names in the folder. When they are complete and on the disk, the old manifest
         is removed, the trajectories are renamed into place, and the manifest last: a folder whose manifest is there
         and whose hashes hold is whole. An older ingest in the folder stays untouched until that moment.
Failure  Whatever goes wrong, the temporary files are removed, and a folder made for them too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from traceforge.errors import InputError, StorageError
from traceforge.trajectories.record import Outcome, Trajectory, encode

TRAJECTORIES = "trajectories.jsonl"
MANIFEST = "manifest.json"

_BUFFER_BYTES = 1 << 20


class OutputFile(msgspec.Struct, frozen=True):
    """Size and hash of a file that was written."""

    bytes: int
    sha256: str


class OutputFolder:
    """Takes records one by one; `commit` puts everything in place.

    Raises:
        InputError: the path is a file.
        StorageError: the disk is full or the folder cannot be written. Nothing is left under the final names.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary: list[Path] = []
        self._handle: BinaryIO | None = None
        self._made: list[Path] = []
        self._hash = hashlib.sha256()
        self._num_bytes = 0

    def __enter__(self) -> OutputFolder:
        if self._folder.exists() and not self._folder.is_dir():
            raise InputError(f"{self._folder}: is a file", hint="name a folder for the output")
        try:
            with self._storage():
                self._made = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
                self._folder.mkdir(parents=True, exist_ok=True)
                self._handle = self._open_temporary(TRAJECTORIES)
        except StorageError:
            self._clean()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean()

    def _clean(self) -> None:
        if self._handle is not None:
            with suppress(OSError):  # On a full disk the last flush fails again.
                self._handle.close()
        for path in self._temporary:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for path in self._made:
            with suppress(OSError):
                path.rmdir()  # Only a folder that this ingest made, and only if nothing came into it.

    def write(self, record: bytes) -> None:
        """Append one encoded trajectory."""
        assert self._handle is not None
        with self._storage():
            for chunk in (record, b"\n"):
                self._handle.write(chunk)
                self._hash.update(chunk)
                self._num_bytes += len(chunk)

    def correct(self, outcomes: Mapping[int, Outcome]) -> list[bool | None]:
        """Write again the records whose outcome changed, named by their place from 0; the others keep their bytes.

        Returns `resolved` as it was in each record that changed.
        """
        assert self._handle is not None
        before_resolved: list[bool | None] = []
        with self._storage():
            self._handle.close()
            uncorrected = self._temporary[-1]
            self._handle = self._open_temporary(f"{TRAJECTORIES}.corrected")
            self._hash, self._num_bytes = hashlib.sha256(), 0
            decoder = msgspec.json.Decoder(Trajectory)
            with uncorrected.open("rb") as lines:
                for number, line in enumerate(lines):
                    record = line.rstrip(b"\n")
                    if number in outcomes:
                        trajectory = decoder.decode(record)
                        before_resolved.append(trajectory.outcome.resolved)
                        record = encode(msgspec.structs.replace(trajectory, outcome=outcomes[number]))
                    self.write(record)
        return before_resolved

    def commit(self, manifest: Callable[[dict[str, OutputFile]], Any]) -> None:
        """Put the files in place; `manifest` is called with the outputs' sizes and hashes and returns JSON values."""
        assert self._handle is not None
        with self._storage():
            trajectories = self._temporary[-1]
            _finish(self._handle)
            outputs = {TRAJECTORIES: OutputFile(bytes=self._num_bytes, sha256=self._hash.hexdigest())}
            text = msgspec.json.format(msgspec.json.encode(manifest(outputs)), indent=2)
            handle = self._open_temporary(MANIFEST)
            handle.write(text + b"\n")
            _finish(handle)
            (self._folder / MANIFEST).unlink(missing_ok=True)
            trajectories.replace(self._folder / TRAJECTORIES)
            self._temporary[-1].replace(self._folder / MANIFEST)

    def _open_temporary(self, name: str) -> BinaryIO:
        path = self._folder / f".{name}.{os.getpid()}.partial"
        self._temporary.append(path)
        return path.open("wb", buffering=_BUFFER_BYTES)

    @contextmanager
    def _storage(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"{self._folder}: cannot write: {error.strerror or error}; nothing half-written was left",
                hint="free space on this disk, or name another output folder",
            ) from error


def _finish(handle: BinaryIO) -> None:
    handle.flush()
    os.fsync(handle.fileno())
    handle.close()
