"""Bytes by part, on the device and on the host, at the moments of an update at which most of them are held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Part = Literal[
    "weights", "adapter", "optimizer", "gradients", "attention", "activations", "logits", "workspace", "process"
]
PARTS: tuple[Part, ...] = (
    "weights", "adapter", "optimizer", "gradients", "attention", "activations", "logits", "workspace", "process",
)  # fmt: skip
LOADING = "loading"
"""The moment before the first update; the others are of updates."""


@dataclass(frozen=True)
class Moment:
    """What is held at one moment of an update; parts that are 0 are left out."""

    name: str
    parts: Mapping[Part, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Ledger:
    """What a run holds.

    Args:
        moments: on the device that computes (the card, or the host of a CPU run).
        pinned: page-locked bytes on the host, by part; empty without a card.
        pageable: other bytes on the host, by part; empty on a CPU run, where they stand in `moments`.
    """

    moments: tuple[Moment, ...]
    pinned: Mapping[Part, int] = field(default_factory=dict)
    pageable: Mapping[Part, int] = field(default_factory=dict)

    @property
    def peak(self) -> Moment:
        """The moment at which most is held."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def update_peak(self) -> Moment:
        """The moment of an update at which most is held: loading does not count."""
        return max((each for each in self.moments if each.name != LOADING), key=lambda moment: moment.total)

    @property
    def host_bytes(self) -> int:
        """Bytes on the host of a run on a card."""
        return sum(self.pinned.values()) + sum(self.pageable.values())


def moment(name: str, *parts: Mapping[Part, int]) -> Moment:
    """Return a moment at which all of these are held together."""
    totals: dict[Part, int] = {}
    for each in parts:
        for part, size in each.items():
            totals[part] = totals.get(part, 0) + size
    return Moment(name, {part: totals[part] for part in PARTS if totals.get(part)})
