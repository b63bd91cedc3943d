"""`logs/rank{n}.json`: where each of several ranks stands, so that one that is killed leaves its stage behind.

Each rank writes its own at every stage and when it fails; whoever started the ranks reads them when one has ended.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, ValidationError

from traceforge.evidence.decision import EvidencePart, Failure, Stage
from traceforge.evidence.storage import to_json, write_whole


class RankRecord(EvidencePart):
    """Where one rank stands."""

    rank: int
    pid: int
    device: str
    """`cpu` or `cuda`."""
    stage: Stage
    failure: Failure | None = None
    written: datetime = Field(default_factory=lambda: datetime.now(UTC))


def write_rank_record(folder: Path, record: RankRecord) -> None:
    """Write `logs/rank{n}.json` of a run folder in one move.

    Raises:
        StorageError: it cannot be written.
    """
    path = _path(folder, record.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(record.model_dump(mode="json"), indent=2) + b"\n")


def read_rank_record(folder: Path, rank: int) -> RankRecord | None:
    """Return what a rank last wrote, or None if it wrote nothing that can be read."""
    try:
        return RankRecord.model_validate_json(_path(folder, rank).read_bytes())
    except (OSError, ValidationError):
        return None


def _path(folder: Path, rank: int) -> Path:
    return folder / "logs" / f"rank{rank}.json"
