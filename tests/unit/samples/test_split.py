"""The split by task: stable, disjoint, and never of a part of a trajectory (fault A30)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceforge.errors import InputError
from traceforge.samples.split import held_out_tasks, stable_hash


def test_the_hash_of_a_task_never_changes() -> None:
    # printf '42:rows#0' | sha256sum
    assert stable_hash("rows#0", seed=42) == "0cdf571390afae9996a3fbc2ba502b91cfaca2a244d7c44d265fcddffae94e09"
    assert stable_hash("größe", seed=0) == "7081ed9d27aa377b401725673061bc6a76ba1cd7a6491ef7dbed0b7534be70f1"


def test_the_held_out_tasks_of_a_seed_never_change() -> None:
    tasks = [f"task-{number}" for number in range(8)]
    # The smallest of `printf "42:task-$i" | sha256sum`: 0d42… is task-7, 2dc3… is task-5, 3464… is task-1.
    assert held_out_tasks(tasks, fraction=0.25, seed=42) == {"task-7", "task-5"}


def test_of_four_trajectories_a_quarter_holds_out_exactly_one_whole() -> None:
    samples = [(f"run-{run}#{turn}", f"run-{run}") for run in range(4) for turn in range(10)]
    held = held_out_tasks((task for _, task in samples), fraction=0.25, seed=42)
    evaluation = {sample for sample, task in samples if task in held}
    train = {sample for sample, task in samples if task not in held}
    assert len(held) == 1
    assert len(evaluation) == 10
    assert len(train) == 30
    assert {sample.split("#")[0] for sample in train} & {sample.split("#")[0] for sample in evaluation} == set()


def test_one_task_cannot_be_split() -> None:
    with pytest.raises(InputError, match=r"data.evaluation_fraction = 0.25 .* only one task \('a'\)"):
        held_out_tasks(["a", "a"], fraction=0.25, seed=42)


@given(
    tasks=st.lists(st.text(max_size=8), min_size=2, unique=True),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
    shuffled=st.randoms(use_true_random=False),
)
def test_a_split_has_its_size_and_does_not_depend_on_order(tasks, fraction, seed, shuffled) -> None:
    held = held_out_tasks(tasks, fraction=fraction, seed=seed)
    assert len(held) == min(len(tasks) - 1, max(1, round(fraction * len(tasks))))
    again = list(tasks) * 2
    shuffled.shuffle(again)
    assert held_out_tasks(again, fraction=fraction, seed=seed) == held
