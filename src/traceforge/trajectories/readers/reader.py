"""What every reader is, and what it is told about the place it reads from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from traceforge.trajectories.record import Trajectory


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a JSON value was found, and the notes taken while reading it.

    Args:
        file: the path as the manifest names it.
        stem: file name without `.traj`, `.json`, `.jsonl`: the id of logs that hold none.
        row: line of a file of lines, or place in a list, from 1; 1 for a file that is one record.
        notes: counts of everything that was repaired or left out without refusing the trajectory, by code.
    """

    file: str
    stem: str
    row: int = 1
    notes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one format.

    Args:
        name: the format, as SOURCES and the manifest call it.
        matches: whether a parsed JSON value is a record of this format; looks at content, never at names.
        read: the record's trajectory. Its id is the one the log asks for; the ingest makes it unique. Raises `Refused`.
    """

    name: str
    matches: Callable[[Any], bool]
    read: Callable[[Any, Origin], Trajectory]
