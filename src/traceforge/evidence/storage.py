"""Writing files so that nothing half-written looks whole, and JSON that every reader accepts.

Whole file   Written beside its place, flushed to the disk, then renamed over it: readers see the old or the new one.
Line file    Each line is one write; a write that fails is cut off again. A torn tail that a crash left is removed
             (and reported to the caller) before the next line is added, so a file never holds half a line inside.
JSON         NaN and infinities do not exist in JSON: they become null, and the object's key `non_finite` says which
             fields were what. A lone surrogate, which UTF-8 cannot hold, becomes U+FFFD.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import numbers
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceforge.errors import StorageError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def finite_or_null(value: object, path: str = "") -> tuple[Any, dict[str, str]]:
    """Return `value` with every non-finite number as None, and what each was: `{"a.b[2]": "nan"}`."""
    if isinstance(value, Mapping):
        parts = [(key, *finite_or_null(each, f"{path}.{key}" if path else str(key))) for key, each in value.items()]
        return {key: clean for key, clean, _ in parts}, {
            name: was for _, _, found in parts for name, was in found.items()
        }
    if isinstance(value, (list, tuple)):
        items = [finite_or_null(each, f"{path}[{index}]") for index, each in enumerate(value)]
        return [clean for clean, _ in items], {name: was for _, found in items for name, was in found.items()}
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value, {}
    if isinstance(value, numbers.Integral):
        return int(value), {}
    number = float(value)
    return (number, {}) if math.isfinite(number) else (None, {path: str(number)})


def to_json(record: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """Return one JSON object as UTF-8; non-finite numbers are null and listed under `non_finite`."""
    clean, non_finite = finite_or_null(record)
    if non_finite:
        clean["non_finite"] = {**(clean.get("non_finite") or {}), **non_finite}
    return encode(clean, indent=indent)


def encode(value: object, *, indent: int | None = None) -> bytes:
    """Return JSON as UTF-8. `value` holds no non-finite number."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    return _LONE_SURROGATE.sub("�", text).encode()


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path` at once: a failure leaves what was there before, and no temporary file.

    Raises:
        StorageError: the disk is full or the folder is not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error(path, error) from error
        raise
    _sync_folder(path.parent)


class LineFile:
    """A file that grows by whole lines. Opened at the first line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, line: bytes) -> int:
        """Add a line, given without its newline; return how many bytes of a torn tail were removed before it.

        Raises:
            StorageError: nothing was added.
        """
        removed = 0
        try:
            if self._descriptor is None:
                self._descriptor, removed = self._open()
            self._write(self._descriptor, line + b"\n")
        except OSError as error:
            raise storage_error(self.path, error) from error
        return removed

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> tuple[int, int]:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        size = os.fstat(descriptor).st_size
        end = _end_of_last_line(descriptor, size)
        os.ftruncate(descriptor, end)
        return descriptor, size - end

    def _write(self, descriptor: int, content: bytes) -> None:
        start = os.fstat(descriptor).st_size
        written = 0
        try:
            while written < len(content):
                written += os.pwrite(descriptor, content[written:], start + written)
        except BaseException:
            # Also when a signal stops the run in the middle of a line.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, start)
            raise


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return the named error for a write to `path` that failed."""
    if error.errno in _FULL_DISK:
        return StorageError(
            f"{path}: cannot write: {error.strerror}; nothing half-written was left",
            hint="free space on this disk, or set output_dir to another one",
        )
    return StorageError(
        f"{path}: cannot write: {error.strerror or error}", hint="set output_dir to a folder that can be written"
    )


def _end_of_last_line(descriptor: int, size: int) -> int:
    position = size
    while position > 0:
        start = max(0, position - 65536)
        newline = os.pread(descriptor, position - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


def _sync_folder(folder: Path) -> None:
    # The rename itself must survive a power cut too. Some file systems refuse to sync a folder; the data is safe then.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
