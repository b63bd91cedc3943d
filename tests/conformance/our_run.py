"""Our side of a comparison as the tests run it: the real loop on the update lists that a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from traceforge.config import RunConfig
from traceforge.oracles.our_run import trace_our_run as train_ours
from traceforge.run_files import parse_run
from traceforge.samples.dataset import WeightedSamples
from traceforge.samples.tokens import Sample
from traceforge.training.methods import Item
from traceforge.training.order import UpdateOrder

__all__ = ["GivenOrder", "run_config", "train_ours", "update_order"]


class GivenOrder:
    """Update lists as a test wants them, in the place of `UpdateOrder`."""

    def __init__(self, updates: Sequence[Sequence[Item]]) -> None:
        self._updates = [tuple(items) for items in updates]

    def updates(self, *, passes: int | None, pass_number: int = 0, position: int = 0):
        for place, items in enumerate(self._updates):
            yield 0, place, items


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """Return a run's settings; nothing in it is loaded from a path."""
    return parse_run({"model": {"name_or_path": "none"}, "data": {"train": "none"}, **sections}, source="test")


def update_order(samples: Sequence[Sample], config: RunConfig) -> UpdateOrder:
    """Return the real order over `samples`, as a run makes it."""
    return UpdateOrder(
        [WeightedSamples(path="test", weight=1.0, samples=tuple(samples))],
        items_per_update=config.items_per_update,
        seed=config.training.seed,
    )
