"""A folder of files that appear together or not at all, each with its sha256.

Whole    Files are written under a temporary name in the target folder and renamed when all are complete; the manifest
         goes last, after the old one was removed. A reader that finds a manifest whose hashes hold has a whole folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from traceforge.errors import InputError, StorageError

MANIFEST = "manifest.json"
_BUFFER_BYTES = 1 << 20


class HashedFile:
    """A file being written, with its size and sha256 so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._hash = hashlib.sha256()
        self._handle: BinaryIO = path.open("wb", buffering=_BUFFER_BYTES)

    def write(self, chunk: bytes) -> None:
        """Append bytes.

        Raises:
            StorageError: the disk is full.
        """
        try:
            self._handle.write(chunk)
        except OSError as error:
            raise _cannot_write(self.path.parent, error) from error
        self._hash.update(chunk)
        self.num_bytes += len(chunk)

    def finish(self) -> dict[str, Any]:
        """Force the bytes to disk and return `{sha256, bytes}`."""
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        return {"sha256": self._hash.hexdigest(), "bytes": self.num_bytes}

    def close(self) -> None:
        """Give the file handle back without a result."""
        self._handle.close()


class FolderWriter:
    """Writes a folder as a context manager: nothing of it is left unless `commit` was reached.

    Raises:
        InputError: the folder is a file.
        StorageError: writing failed (a full disk, a folder that is not writable), at any moment of the block.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, HashedFile] = {}
        self._discarded: list[HashedFile] = []
        self._made_folders: list[Path] = []

    def __enter__(self) -> Self:
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}: is a file", hint="name a folder for the output")
        try:
            self._made_folders = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        return self

    def file(self, name: str) -> HashedFile:
        """Return a new file of the folder; it gets its name at `commit`."""
        try:
            self._files[name] = HashedFile(self.folder / f".{name}.{os.getpid()}.part")
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        return self._files[name]

    def rewrite(self, name: str) -> tuple[Path, HashedFile]:
        """Return what has been written of a file so far, complete, and a new file that will take its name instead."""
        old = self._files.pop(name)
        old.finish()
        self._discarded.append(old)
        try:
            self._files[name] = HashedFile(old.path.with_name(f"{old.path.name}2"))
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        return old.path, self._files[name]

    def outputs(self) -> dict[str, dict[str, Any]]:
        """Force every file to the disk and return `{name: {sha256, bytes}}`; nothing more can be written then."""
        return {name: file.finish() for name, file in self._files.items()}

    def commit(self, manifest: dict[str, Any], *, stale: tuple[str, ...] = ()) -> None:
        """Put every file in place and then `manifest.json`, with the files' hashes added as `outputs`.

        Args:
            manifest: JSON values.
            stale: names of files an earlier build may have left that no longer belong to the folder.
        """
        text = json.dumps({**manifest, "outputs": self.outputs()}, indent=2, ensure_ascii=False) + "\n"
        self.file(MANIFEST).write(text.encode())
        self._files[MANIFEST].finish()
        for name in (MANIFEST, *stale):
            (self.folder / name).unlink(missing_ok=True)
        for name, file in self._files.items():
            file.path.replace(self.folder / name)
        self._files.clear()
        self._made_folders = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (*self._files.values(), *self._discarded):
            # A full disk fails again on closing; the first error is the one to tell.
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                file.path.unlink(missing_ok=True)
        for made in self._made_folders:
            with contextlib.suppress(OSError):  # Somebody else may have put a file there.
                made.rmdir()
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _cannot_write(self.folder, error) from error


def _cannot_write(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{folder}: cannot write: {error.strerror or error}",
        hint="free space on the disk or choose another output folder; nothing was left half-written",
    )
