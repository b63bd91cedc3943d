"""Sharing an update over ranks, by what the samples cost and not by how many there are. Imports no torch.

Cost     A token costs the linear layers once, and attention once for each token that it sees (its depth + 1). Both are
         counted on the prefix tree: a shared token costs once on each rank that computes it.
Ways     1. Whole groups, the dearest first, each to the rank that has least so far: nothing shared is computed twice.
         2. The samples in the order of their tokens, cut into runs so that the dearest run is as cheap as it can be:
         neighbours share the longest prefixes, so a cut repeats as little as possible.
         The way whose slowest rank has less to do is taken; the first, if they are equal.
Never    does it change an update: the ranks' gradients are summed, whoever computed them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol, TypeVar

from traceforge.samples.prefix_tree import common_prefix_length, token_key
from traceforge.samples.tokens import Sample


class Member(Protocol):
    """What is shared out whole: a sample, or a pair."""

    @property
    def group_id(self) -> str:
        """What is better kept together."""
        ...

    @property
    def samples(self) -> Sequence[Sample]:
        """Its sequences."""
        ...


_Member = TypeVar("_Member", bound=Member)


def shares(
    members: Sequence[_Member],
    num_ranks: int,
    *,
    attention_cost: float,
    share: bool = True,
) -> list[list[_Member]]:
    """Return the part of each rank, in the given order; a part may be empty. The same members give the same parts.

    Args:
        members: the samples (or pairs) of one update, or of an evaluation set.
        attention_cost: what one query that meets one key costs, in tokens of the linear layers: `attention_cost_of`.
        share: whether the model computes shared prefixes once.
    """
    if num_ranks == 1:
        return [list(members)]
    sequences = [member.samples for member in members]
    costs = _Costs(attention_cost, share)
    ways = [_whole_groups(members, sequences, num_ranks, costs), _runs(sequences, num_ranks, costs)]
    slowest = [max(costs.of([s for number in part for s in sequences[number]]) for part in way) for way in ways]
    best = ways[0] if slowest[0] <= slowest[1] else ways[1]
    return [[members[number] for number in sorted(part)] for part in best]


def attention_cost_of(hidden_size: int) -> float:
    """Return what one query that meets one key costs, in tokens of the linear layers, for a usual decoder.

    A layer takes about 24 D^2 operations for a token (projections and a gated MLP four times as wide) and 4 D for one
    query with one key.
    """
    return 1 / (6 * hidden_size)


class _Costs:
    """Costs as whole numbers, so that no order of adding them can decide where a sample goes."""

    def __init__(self, attention_cost: float, share: bool) -> None:
        self._token = round(1 / attention_cost)  # one query with one key is the unit
        self.share = share

    def of(self, samples: Sequence[Sample]) -> int:
        """Return the cost of the prefix trees of some samples."""
        if not self.share:
            return sum(self._tail(sample, 0) for sample in samples)
        ordered = sorted(samples, key=lambda sample: token_key(sample.token_ids_S))
        total = sum(self._tail(sample, 0) for sample in ordered[:1])
        for left, right in itertools.pairwise(ordered):
            total += self._tail(right, common_prefix_length(left.token_ids_S, right.token_ids_S))
        return total

    def _tail(self, sample: Sample, known: int) -> int:
        """Return the cost of a sample's tokens from depth `known` on."""
        length = sample.num_tokens
        return (length - known) * self._token + (length * (length + 1) - known * (known + 1)) // 2


def _whole_groups(
    members: Sequence[_Member], sequences: Sequence[Sequence[Sample]], num_ranks: int, costs: _Costs
) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for number, member in enumerate(members):
        groups.setdefault(member.group_id if costs.share else str(number), []).append(number)
    priced = [(costs.of([s for number in group for s in sequences[number]]), group) for group in groups.values()]
    loads = [0] * num_ranks
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for cost, group in sorted(priced, key=lambda each: (-each[0], each[1][0])):
        rank = loads.index(min(loads))
        loads[rank] += cost
        parts[rank] += group
    return parts


def _runs(sequences: Sequence[Sequence[Sample]], num_ranks: int, costs: _Costs) -> list[list[int]]:
    order = sorted(range(len(sequences)), key=lambda number: token_key(sequences[number][0].token_ids_S))
    first = [costs.of(sequences[number]) for number in order]  # the cost of a run that begins here
    more = [0] * len(order)  # what joining the run of the one before costs
    for place, (left, right) in enumerate(itertools.pairwise(order), start=1):
        more[place] = costs.of([*sequences[left], *sequences[right]]) - first[place - 1]
    low, high = max(first, default=0), sum(first)
    while low < high:  # the smallest limit that lets the runs be few enough
        limit = (low + high) // 2
        if len(_cut(first, more, limit)) <= num_ranks:
            high = limit
        else:
            low = limit + 1
    runs = _cut(first, more, low)
    return [[order[place] for place in run] for run in runs] + [[] for _ in range(num_ranks - len(runs))]


def _cut(first: Sequence[int], more: Sequence[int], limit: int) -> list[list[int]]:
    """Return runs of places, each as long as `limit` lets it be."""
    runs: list[list[int]] = []
    cost = 0
    for place, (alone, joined) in enumerate(zip(first, more, strict=True)):
        if runs and cost + joined <= limit:
            runs[-1].append(place)
            cost += joined
        else:
            runs.append([place])
            cost = alone
    return runs
