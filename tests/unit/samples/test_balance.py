"""Sharing an update over ranks by cost, against brute force and numbers worked out by hand."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceforge.samples.balance import attention_cost_of, shares
from traceforge.samples.tokens import Sample

FREE_ATTENTION = 1e-12
"""So small that only tokens of the linear layers count."""


def sample(name: str, ids, group: str | None = None) -> Sample:
    ids = np.asarray(ids, dtype=np.int64)
    weights = np.ones(ids.size)
    weights[0] = 0.0
    return Sample(name, group or name, group or name, ids, weights)


def alone(name: str, length: int, first_token: int) -> Sample:
    return sample(name, np.arange(first_token, first_token + length))


def tree_cost(samples, attention_cost: float, *, share: bool = True) -> float:
    """Return the cost by its definition: every distinct prefix costs a token and its depth + 1 queries."""
    tokens = [tuple(each.token_ids_S[: n + 1]) for each in samples for n in range(each.num_tokens)]
    return sum(1 + len(prefix) * attention_cost for prefix in (set(tokens) if share else tokens))


def test_ranks_get_equal_costs_and_not_equal_numbers():
    long, *short = alone("long", 90, 0), *(alone(f"short{n}", 30, 1000 * (n + 1)) for n in range(3))
    parts = shares([short[0], long, *short[1:]], 2, attention_cost=FREE_ATTENTION)
    assert [[each.sample_id for each in part] for part in parts] == [["long"], ["short0", "short1", "short2"]]


def test_a_long_sample_costs_more_than_its_tokens_say():
    # 100 tokens meet 5,050 keys, 40 meet 820. By tokens: 100 + 2 x 40 against 4 x 40. At 0.02 tokens a key the long one
    # costs 201 and a short one 56.4: 257.4 against 282.
    members = [alone("long", 100, 0), *(alone(f"short{n}", 40, 1000 + 100 * n) for n in range(6))]
    assert [len(part) for part in shares(members, 2, attention_cost=FREE_ATTENTION)] == [3, 4]
    assert [len(part) for part in shares(members, 2, attention_cost=0.02)] == [2, 5]


def test_samples_of_one_trajectory_stay_on_one_rank_when_there_are_enough_trajectories():
    members = [
        sample(f"{group}#{turn}", [7, *range(100 * number, 100 * number + 10 * (turn + 1))], group)
        for turn in range(3)
        for number, group in enumerate("abcd", start=1)
    ]
    parts = shares(members, 2, attention_cost=0.001)
    owners = [{each.group_id for each in part} for part in parts]
    assert owners[0].isdisjoint(owners[1])
    assert sum(len(part) for part in parts) == 12


def test_one_trajectory_on_two_ranks_is_cut_where_least_is_repeated():
    # Turns fork from a trunk in two bundles; the bundles share 40 tokens inside and 10 with each other.
    trunk, left, right = list(range(10)), list(range(100, 130)), list(range(200, 230))
    members = [
        sample(f"t#{n}", trunk + side + [1000 + 10 * n + k for k in range(5)], "t")
        for n, side in enumerate([left, right, left, right])
    ]
    parts = shares(members, 2, attention_cost=FREE_ATTENTION)
    assert [[each.sample_id for each in part] for part in parts] == [["t#0", "t#2"], ["t#1", "t#3"]]


def test_a_rank_may_be_left_without_samples():
    members = [alone(f"s{n}", 10, 100 * n) for n in range(3)]
    parts = shares(members, 4, attention_cost=0.001)
    assert sorted(len(part) for part in parts) == [0, 1, 1, 1]
    twins = [sample(f"twin{n}", range(50), "twins") for n in range(3)]
    assert sorted(len(part) for part in shares(twins, 2, attention_cost=0.001)) == [0, 3]


def test_what_is_not_shared_by_the_model_is_not_kept_together():
    members = [sample(f"t#{n}", [*range(50), 1000 + n], "t") for n in range(4)]
    parts = shares(members, 2, attention_cost=0.001, share=False)
    assert [len(part) for part in parts] == [2, 2]


def test_members_of_several_sequences_are_shared_out_whole():
    class TwoSided:
        def __init__(self, name, start):
            self.pair_id = self.group_id = name
            self.samples = [sample(f"{name}+", [1, *range(start, start + 9)]), sample(f"{name}-", [1, 2, start])]

    members = [TwoSided(f"p{n}", 100 * (n + 1)) for n in range(5)]
    parts = shares(members, 2, attention_cost=0.01)
    assert sorted(len(part) for part in parts) == [2, 3]
    assert {each.pair_id for part in parts for each in part} == {f"p{n}" for n in range(5)}


def test_the_cost_of_attention_falls_with_the_width():
    assert attention_cost_of(4096) == pytest.approx(1 / 24576)


@st.composite
def some_members(draw):
    generator = random.Random(draw(st.integers(0, 10**6)))
    members = []
    for number in range(draw(st.integers(1, 7))):
        base = members[generator.randrange(len(members))].token_ids_S.tolist() if members else []
        kept = base[: generator.randint(0, len(base))]
        ids = kept + [generator.randrange(3) for _ in range(generator.randint(1, 6))]
        members.append(sample(f"s{number}", ids, f"g{generator.randrange(3)}"))
    return members


@settings(max_examples=150, deadline=None)
@given(some_members(), st.integers(2, 4), st.sampled_from([0.001, 0.1]), st.booleans())
def test_every_member_is_shared_out_once_in_order_and_no_worse_than_the_best_cut(members, num_ranks, attention, share):
    parts = shares(members, num_ranks, attention_cost=attention, share=share)
    assert len(parts) == num_ranks
    assert sorted(each.sample_id for part in parts for each in part) == sorted(each.sample_id for each in members)
    order = [each.sample_id for each in members]
    for part in parts:
        assert [each.sample_id for each in part] == sorted((each.sample_id for each in part), key=order.index)
    again = shares(list(members), num_ranks, attention_cost=attention, share=share)
    assert [[each.sample_id for each in part] for part in again] == [[e.sample_id for e in part] for part in parts]

    # Brute force over all cuts of the sorted order: the result's slowest rank is at most as slow as the best of them.
    ordered = sorted(members, key=lambda each: tuple(each.token_ids_S))
    places = range(len(ordered) + 1)
    best = min(
        max(tree_cost(ordered[a:b], attention, share=share) for a, b in itertools.pairwise((0, *cuts, len(ordered))))
        for cuts in itertools.combinations_with_replacement(places, num_ranks - 1)
    )
    assert max(tree_cost(part, attention, share=share) for part in parts) <= best * (1 + 1e-9)
