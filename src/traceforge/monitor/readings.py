"""A card, one reading of it, and how a driver's text becomes a number or nothing."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Protocol

from traceforge.errors import TraceForgeError

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


class MonitorError(TraceForgeError, RuntimeError):
    """The cards cannot be read: no driver, no tool, or a card that cannot be told apart. Never ends a run."""


@dataclass(frozen=True)
class Card:
    """One card, or one MIG instance of it, as the driver names it.

    Args:
        index: the driver's own number, whatever CUDA_VISIBLE_DEVICES says; of a MIG instance that of its card.
        uuid: `GPU-...` or `MIG-...`.
        pcie_link: link in use and the best one, such as `gen 4 x16 of gen 4 x16`; None = not told.
        mig_of: UUID of the card that this MIG instance is a part of; None for a whole card.
    """

    index: int
    uuid: str
    name: str = ""
    memory_total_mib: float | None = None
    driver: str | None = None
    pcie_link: str | None = None
    mig_of: str | None = None


@dataclass(frozen=True)
class Reading:
    """What a card says at one moment; None = it does not say."""

    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    util_gpu: float | None = None
    util_mem: float | None = None
    power_draw_w: float | None = None
    temp_c: float | None = None


FIELDS = tuple(each.name for each in fields(Reading))
"""The columns of gpu.csv that are read from the card, in their order."""

NOTHING = Reading()
"""The reading of a card that no longer answers."""


class Source(Protocol):
    """What cards are read through; `name` is what the evidence says."""

    name: str

    def cards(self) -> list[Card]:
        """Return every card, and every MIG instance behind its card.

        Raises:
            MonitorError: the driver does not answer.
        """
        ...

    def read(self, cards: list[Card]) -> list[Reading]:
        """Return one reading of each card, `NOTHING` of one that does not answer. Never raises."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


def number_or_none(text: str) -> float | None:
    """Return the number a driver wrote, with or without its unit; None for `N/A`, `[Not Supported]` and their like."""
    found = _NUMBER.match(text.strip())
    value = float(found[0]) if found else math.nan
    return value if math.isfinite(value) else None


def select_cards(cards: list[Card], wanted: tuple[str, ...] | None) -> list[Card]:
    """Return the cards that a run uses, in its own order: the first is what CUDA calls 0.

    Args:
        cards: every card of the host and its MIG instances.
        wanted: entries as in CUDA_VISIBLE_DEVICES: numbers, UUIDs or beginnings of UUIDs, with or without `GPU-`;
            None = every whole card.

    Raises:
        MonitorError: an entry names no card, or more than one.
    """
    if wanted is None:
        return [card for card in cards if card.mig_of is None]
    chosen = []
    for entry in wanted:
        if entry.isdigit():
            matches = [card for card in cards if card.mig_of is None and card.index == int(entry)]
        else:
            matches = [card for card in cards if card.uuid.startswith((entry, f"GPU-{entry}", f"MIG-{entry}"))]
        if len(matches) != 1:
            what = "no card" if not matches else f"{len(matches)} cards"
            raise MonitorError(f"{entry} names {what} of {len(cards)}", hint="see `nvidia-smi -L`")
        chosen.append(matches[0])
    return chosen
