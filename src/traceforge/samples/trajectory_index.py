"""The records of a `trajectories.jsonl` by id, each read when asked for: the sides of a pair may lie far apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from traceforge.errors import InputError
from traceforge.trajectories.record import Trajectory, read_trajectories

_KEPT_RECORDS = 4


class TrajectoryIndex:
    """Where each record stands in its file. The last few that were asked for are kept, as the same objects.

    Raises:
        InputError: the file cannot be read, a line is not a record, or two records share an id.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts: dict[str, int] = {}
        self._kept: dict[str, Trajectory] = {}
        self._decoder = msgspec.json.Decoder(Trajectory)
        # Two readers in step: the one knows what is wrong with a line, the other where it begins.
        for trajectory, start in zip(read_trajectories(path), _line_starts(path), strict=True):
            if trajectory.trajectory_id in self._starts:
                raise InputError(
                    f"{path}: two trajectories have the id {trajectory.trajectory_id!r}; a pair could mean either",
                    hint="ingest the logs again into one folder; ingesting gives every trajectory an id of its own",
                )
            self._starts[trajectory.trajectory_id] = start

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._starts

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._starts)

    def get(self, trajectory_id: str) -> Trajectory:
        """Return one record.

        Raises:
            KeyError: there is none of this id.
        """
        kept = self._kept.pop(trajectory_id, None)
        if kept is None:
            with self._path.open("rb") as handle:
                handle.seek(self._starts[trajectory_id])
                kept = self._decoder.decode(handle.readline())
        self._kept[trajectory_id] = kept
        if len(self._kept) > _KEPT_RECORDS:
            del self._kept[next(iter(self._kept))]
        return kept


def _line_starts(path: Path) -> Iterator[int]:
    """Yield where each line that is not blank begins."""
    position = 0
    with path.open("rb") as handle:
        for line in handle:
            if line.strip():
                yield position
            position += len(line)
