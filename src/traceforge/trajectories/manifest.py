"""What an ingest reports: `manifest.json`, and the summary that the command prints."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from traceforge.trajectories.outcomes import LabelCounts
from traceforge.trajectories.record import Trajectory
from traceforge.trajectories.refusals import Refusal

SCHEMA_VERSION = "traceforge-ingest/1"


class FileEntry(msgspec.Struct):
    """One file that was read to its end. `format` joins by `+` what was found in it; None if nothing was."""

    path: str
    bytes: int = 0
    sha256: str = ""
    format: str | None = None
    trajectories: int = 0
    refused: int = 0

    def found(self, name: str) -> None:
        """Note a format that occurs in the file."""
        known = set(self.format.split("+")) if self.format else set()
        self.format = "+".join(sorted(known | {name}))


class LabelFile(msgspec.Struct, frozen=True):
    """One label file that was read."""

    path: str
    bytes: int
    sha256: str
    labels: int


class Counts(msgspec.Struct):
    """Everything that was counted, over the whole ingest.

    Args:
        files: files read, refused ones included.
        side_files: label and prediction files found among the inputs; they hold no trajectories.
        trajectories: records written.
        turns: assistant messages in them.
        messages: messages in them.
        observations: messages that the environment wrote.
        with_reasoning: turns that state their reasoning.
        resolved: trajectories whose outcome says so.
        unresolved: trajectories whose outcome says not.
        unlabelled: trajectories of unknown outcome.
        refused: refusals of any kind.
        hidden: files and folders passed over because their name begins with a dot.
        repeated: files that the inputs name more than once, read once.
    """

    files: int = 0
    side_files: int = 0
    trajectories: int = 0
    turns: int = 0
    messages: int = 0
    observations: int = 0
    with_reasoning: int = 0
    resolved: int = 0
    unresolved: int = 0
    unlabelled: int = 0
    refused: int = 0
    hidden: int = 0
    repeated: int = 0

    def add(self, trajectory: Trajectory) -> None:
        """Count one record."""
        self.trajectories += 1
        self.messages += len(trajectory.messages)
        for message in trajectory.messages:
            self.turns += message.role == "assistant"
            self.observations += message.observation
            self.with_reasoning += message.role == "assistant" and message.reasoning is not None
        self.count_outcome(trajectory.outcome.resolved, 1)

    def count_outcome(self, resolved: bool | None, by: int) -> None:
        """Count `by` more trajectories of an outcome."""
        if resolved is None:
            self.unlabelled += by
        elif resolved:
            self.resolved += by
        else:
            self.unresolved += by


class Manifest(msgspec.Struct, kw_only=True):
    """`manifest.json`, to which the folder adds the `outputs`. `notes` counts repairs and keys that were not read."""

    schema_version: str = SCHEMA_VERSION
    created: str
    traceforge: str
    inputs: list[str]
    label_inputs: list[str]
    counts: Counts
    formats: dict[str, int]
    notes: dict[str, int]
    refusals_by_reason: dict[str, int]
    refusals: list[Refusal]
    refusals_not_listed: int
    ways_out: dict[str, str]
    files: list[FileEntry]
    label_files: list[LabelFile]
    labels: LabelCounts


class IngestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What `ingest` returns: where it wrote, and the counts of the manifest."""

    output: str
    trajectories_file: str
    manifest_file: str
    counts: Counts
    formats: dict[str, int]
    notes: dict[str, int]
    refusals_by_reason: dict[str, int]
    labels: LabelCounts

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def describe(self) -> str:
        """Return a few lines for a person."""
        counts = self.counts
        lines = [
            f"{counts.trajectories:,} trajectories with {counts.turns:,} turns from {counts.files:,} files "
            f"({_counted(self.formats)})",
            f"outcomes: {counts.resolved:,} resolved, {counts.unresolved:,} not, {counts.unlabelled:,} unknown",
            f"refused: {_counted(self.refusals_by_reason)}",
        ]
        if self.notes:
            lines.append(f"noted: {_counted(self.notes)}")
        return "\n".join([*lines, f"wrote {self.trajectories_file}", f"wrote {self.manifest_file}"])

    def to_json(self) -> str:
        """Return one JSON document."""
        return msgspec.json.encode(self).decode()


def by_count(counter: Counter[str]) -> dict[str, int]:
    """Return a counter as a dict, the largest first and equal ones by name."""
    return dict(sorted(counter.items(), key=lambda item: (-item[1], item[0])))


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "nothing"
