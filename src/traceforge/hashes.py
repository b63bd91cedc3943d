"""sha256 of files and folders, streamed: what evidence names inputs, weights and data by."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_sha256(path: Path) -> str:
    """Return the hex sha256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def folder_sha256(folder: Path) -> str:
    """Return one hex sha256 over the relative names and contents of a folder's files, hidden ones left out."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda each: each.relative_to(folder).as_posix()):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            digest.update(f"{name.as_posix()}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()
