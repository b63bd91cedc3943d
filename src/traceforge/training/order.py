"""Which samples make up which update: a pure function of samples, seed and pass, so any run can be picked up anywhere.

A pass sees each group of a source `weight` times, in a seeded order. An update takes whole groups until it holds at
least `items_per_update` samples. Updates never cross passes, so the last one of a pass may be short.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import count

from traceforge.samples.dataset import WeightedSamples
from traceforge.samples.pair_loading import WeightedPairs
from traceforge.training.methods import Item


class UpdateOrder:
    """The update lists of every pass.

    Args:
        sources: samples with their weights; a group is all samples of one `group_id` within a source.
        items_per_update: least number of samples or pairs an update takes before it stops taking groups.
        seed: decides the order; the same seed gives the same lists.
    """

    def __init__(
        self, sources: Sequence[WeightedSamples] | Sequence[WeightedPairs], *, items_per_update: int, seed: int
    ) -> None:
        self._sources = [(source.weight, _groups(source.samples)) for source in sources]
        self._items_per_update = items_per_update
        self._seed = seed
        assert any(groups for _, groups in self._sources), "a data set without samples is refused earlier"

    def updates_of_pass(self, pass_number: int) -> list[tuple[Item, ...]]:
        """Return the update lists of one pass, in order."""
        groups = [
            group
            for number, (weight, members) in enumerate(self._sources)
            for group in self._share_of_pass(members, weight, number, pass_number)
        ]
        random.Random(f"{self._seed}:{pass_number}").shuffle(groups)  # noqa: S311 - an order, not a secret
        updates: list[tuple[Item, ...]] = []
        current: list[Item] = []
        for group in groups:
            current.extend(group)
            if len(current) >= self._items_per_update:
                updates.append(tuple(current))
                current = []
        if current:
            updates.append(tuple(current))
        return updates

    def updates(
        self, *, passes: int | None, pass_number: int = 0, position: int = 0
    ) -> Iterator[tuple[int, int, tuple[Item, ...]]]:
        """Yield (pass, position, samples) from the given place on; endlessly if `passes` is None."""
        empty_passes = 0
        for number in count(pass_number) if passes is None else range(pass_number, passes):
            lists = self.updates_of_pass(number)
            empty_passes = 0 if lists else empty_passes + 1
            assert empty_passes < 10_000, "the weights of all sources round to nothing"
            for place in range(position if number == pass_number else 0, len(lists)):
                yield number, place, lists[place]

    def num_updates(self, passes: int) -> int:
        """Return how many updates `passes` passes make if none is skipped."""
        return sum(len(self.updates_of_pass(number)) for number in range(passes))

    def _share_of_pass(
        self, groups: Sequence[tuple[Item, ...]], weight: float, source: int, pass_number: int
    ) -> list[tuple[Item, ...]]:
        """Return the groups of one source in one pass: whole copies, then a rotating part that covers all in turn."""
        whole, fraction = int(weight), weight - int(weight)
        share = list(groups) * whole
        if fraction:
            turn = list(groups)
            random.Random(f"{self._seed}:source {source}").shuffle(turn)  # noqa: S311
            start, stop = (math.floor(number * fraction * len(turn)) for number in (pass_number, pass_number + 1))
            share += [turn[index % len(turn)] for index in range(start, stop)]
        return share


def _groups(samples: Sequence[Item]) -> list[tuple[Item, ...]]:
    members: dict[str, list[Item]] = {}
    for sample in samples:
        members.setdefault(sample.group_id, []).append(sample)
    return [tuple(group) for group in members.values()]
