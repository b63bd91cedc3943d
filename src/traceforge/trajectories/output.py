"""The folder an ingest writes: `trajectories.jsonl` and `manifest.json`, both whole or not there.

An older ingest in the folder stays untouched until the new one is complete (`traceforge.folders`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from traceforge.errors import InputError
from traceforge.folders import MANIFEST, FolderWriter, HashedFile
from traceforge.trajectories.record import Outcome, Trajectory, encode

TRAJECTORIES = "trajectories.jsonl"


class OutputFolder(FolderWriter):
    """Takes records one by one; `commit` puts everything in place.

    Raises:
        InputError: the path is a file, or holds a `trajectories.jsonl` of another origin.
        StorageError: the disk is full or the folder cannot be written. Nothing is left under the final names.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._records: HashedFile | None = None

    def __enter__(self) -> Self:
        self._check_not_foreign()
        super().__enter__()
        self._records = self.file(TRAJECTORIES)
        return self

    def _check_not_foreign(self) -> None:
        """Refuse a folder whose `trajectories.jsonl` no ingest has written: it would be overwritten."""
        if not (self.folder / TRAJECTORIES).exists():
            return
        try:
            schema = json.loads((self.folder / MANIFEST).read_bytes()).get("schema_version")
        except (OSError, ValueError, AttributeError):
            schema = None
        if not str(schema).startswith("traceforge-ingest/"):
            raise InputError(
                f"{self.folder / TRAJECTORIES}: not written by an ingest, and it would be overwritten",
                hint="name another folder with -o",
            )

    def write(self, record: bytes) -> None:
        """Append one encoded trajectory."""
        assert self._records is not None
        self._records.write(record + b"\n")

    def correct(self, outcomes: Mapping[int, Outcome]) -> list[bool | None]:
        """Write again the records whose outcome changed, named by their place from 0; the others keep their bytes.

        Returns `resolved` as it was in each record that changed.
        """
        before_resolved: list[bool | None] = []
        decoder = msgspec.json.Decoder(Trajectory)
        uncorrected, self._records = self.rewrite(TRAJECTORIES)
        with uncorrected.open("rb") as lines:
            for number, line in enumerate(lines):
                record = line.rstrip(b"\n")
                if number in outcomes:
                    trajectory = decoder.decode(record)
                    before_resolved.append(trajectory.outcome.resolved)
                    record = encode(msgspec.structs.replace(trajectory, outcome=outcomes[number]))
                self.write(record)
        return before_resolved
