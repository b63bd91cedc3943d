"""One clock, seeded order, learning rate: the sequences worked out by hand."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceforge.config import OptimizerSettings, ScheduleSettings
from traceforge.samples.tokens import Sample
from traceforge.training.clock import Clock, is_due
from traceforge.training.optimizer import learning_rate
from traceforge.training.order import UpdateOrder


def source(groups: dict[str, int], weight: float = 1.0):
    samples = [
        Sample(f"{name}#{turn}", name, name, np.array([1, 2]), np.array([0.0, 1.0]))
        for name, count in groups.items()
        for turn in range(count)
    ]
    return SimpleNamespace(path="p", weight=weight, samples=tuple(samples))


def order(*sources, samples_per_update=4, seed=42):
    return UpdateOrder(sources, items_per_update=samples_per_update, seed=seed)


def ids(update):
    return [sample.sample_id for sample in update]


def test_nine_single_samples_by_four_in_two_passes_make_six_updates():
    updates = list(order(source({f"s{n}": 1 for n in range(9)})).updates(passes=2))
    assert [len(samples) for _, _, samples in updates] == [4, 4, 1, 4, 4, 1]
    assert [(number, place) for number, place, _ in updates] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for number in (0, 1):
        seen = [name for each, _, samples in updates if each == number for name in ids(samples)]
        assert sorted(seen) == [f"s{n}#0" for n in range(9)]


def test_the_linear_schedule_over_six_updates_is_the_one_worked_out_by_hand():
    settings = ScheduleSettings(kind="linear")
    rates = [learning_rate(settings, 1e-4, update=number, total_updates=6) for number in range(6)]
    assert rates == pytest.approx([1e-4, 8.3333e-5, 6.6667e-5, 5e-5, 3.3333e-5, 1.6667e-5], rel=1e-4)


def test_warm_up_rises_to_the_peak_and_cosine_falls_from_it():
    settings = ScheduleSettings(kind="cosine", warmup_updates=3)
    rates = [learning_rate(settings, 1.0, update=number, total_updates=7) for number in range(8)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def test_an_update_takes_whole_groups_until_it_holds_enough():
    updates = order(source({"a": 3, "b": 3, "c": 3, "d": 3})).updates_of_pass(0)
    assert [len(update) for update in updates] == [6, 6]
    for update in updates:
        counts = Counter(sample.group_id for sample in update)
        assert set(counts.values()) == {3}


def test_another_pass_has_another_order_and_the_same_seed_the_same():
    made = order(source({f"s{n}": 1 for n in range(20)}))
    again = order(source({f"s{n}": 1 for n in range(20)}))
    assert [ids(u) for u in made.updates_of_pass(0)] == [ids(u) for u in again.updates_of_pass(0)]
    assert [ids(u) for u in made.updates_of_pass(0)] != [ids(u) for u in made.updates_of_pass(1)]


def test_a_run_can_be_picked_up_at_any_place():
    made = order(source({f"s{n}": 1 for n in range(9)}))
    whole = list(made.updates(passes=3))
    for cut in range(len(whole)):
        pass_number, position, _ = whole[cut]
        rest = list(made.updates(passes=3, pass_number=pass_number, position=position))
        assert [ids(u) for _, _, u in rest] == [ids(u) for _, _, u in whole[cut:]]


@given(weight=st.floats(0.05, 3.0), groups=st.integers(1, 13), passes=st.integers(1, 12))
def test_a_weight_is_how_often_each_group_is_seen_in_a_pass(weight, groups, passes):
    made = order(source({f"g{n}": 2 for n in range(groups)}, weight), source({"always": 1}), samples_per_update=1)
    seen = Counter(s.group_id for n in range(passes) for u in made.updates_of_pass(n) for s in u)
    assert seen["always"] == passes
    for name in (f"g{n}" for n in range(groups)):
        assert abs(seen[name] / 2 - weight * passes) <= 1  # the rotating part covers every group in turn


def test_updates_go_on_over_passes_until_told_to_stop():
    endless = order(source({"a": 1, "b": 1}), samples_per_update=1).updates(passes=None)
    assert [next(endless)[0] for _ in range(7)] == [0, 0, 1, 1, 2, 2, 3]


def test_a_skipped_update_consumes_its_samples_and_does_not_tick():
    clock = Clock()
    rates = []
    settings = ScheduleSettings(kind="linear")
    for position, finite in enumerate([True, False, True]):
        rates.append(learning_rate(settings, OptimizerSettings().learning_rate, update=clock.updates, total_updates=4))
        clock.consumed(0, position)
        if finite:
            clock.tick()
        else:
            clock.skip()
    assert clock == Clock(updates=2, skipped=1, skipped_in_a_row=0, pass_number=0, position=3)
    assert rates == pytest.approx([2e-4, 1.5e-4, 1.5e-4])


def test_what_happens_every_n_updates_is_due_after_update_n():
    assert [n for n in range(1, 10) if is_due(Clock(updates=n), 4)] == [4, 8]
    assert not is_due(Clock(updates=4), None)
