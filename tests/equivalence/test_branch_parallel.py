"""Branch-parallel on real gloo ranks: the update of a pair whose branches live on two ranks is that of one process.

The reference is the shared prefix in this process, which `test_pairs_against_plain_branches.py` holds against plain
torch. Tolerances (float32): loss 1e-6 relative, gradient 1e-4 and weight changes 1e-3 relative L2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.equivalence.test_pairs_against_plain_branches import CASES, SETTINGS
from tests.ranks import RankFailure, in_ranks
from tests.tiny_models import tiny_language_model

from traceforge.config import OptimizerSettings
from traceforge.oracles.record import relative_l2
from traceforge.parallel.world import ONE_PROCESS, World
from traceforge.samples.branches import Pair
from traceforge.training import update
from traceforge.training.evaluation import evaluate
from traceforge.training.methods import Scores, Simpo
from traceforge.training.optimizer import build_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

PAIRS: list[Pair] = [
    *CASES["several pairs from one trajectory and one apart"],
    *CASES["several turns, each sequence its own, as when a template drops old reasoning"],
]


def updates(world: World, bug: str = "") -> dict[str, Any]:
    """Make three updates and return all that must be equal however many ranks there are."""
    model = tiny_language_model("llama")
    method = Simpo(SETTINGS, world)
    optimizer = build_optimizer(model.trainable(), OptimizerSettings(learning_rate=3e-3))
    before = {name: parameter.detach().clone() for name, parameter in model.trainable()}
    if bug == "the score of the other side keeps a gradient path":
        own = Simpo._scores

        def own_twice(self: Simpo, language_model: Any, row: Any) -> tuple[Scores, Scores]:
            chosen, rejected = own(self, language_model, row)
            return (chosen, chosen) if world.branch_rank == 0 else (rejected, rejected)

        method._scores = own_twice.__get__(method)  # type: ignore[method-assign]
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({name: p.grad.detach().clone() for name, p in model.trainable()})
    )
    results = []
    for start in (0, 2, 1):
        planned = update.plan_update(model, PAIRS[start : start + 3], tokens_per_row=400, method=method, world=world)
        results.append(update.apply_update(model, planned, optimizer, max_gradient_norm=0.05, world=world))
    measured = evaluate(model, PAIRS, tokens_per_row=400, method=method, world=world)
    return {
        "losses": [each.loss for each in results],
        "norms": [each.gradient_norm for each in results],
        "logged": [dict(each.logged) for each in results],
        "evaluation": (measured.loss, dict(measured.logged)),
        "gradients": [{name: each.numpy() for name, each in step.items()} for step in gradients],
        "changes": {name: (p.detach() - before[name]).numpy() for name, p in model.trainable()},
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return updates(ONE_PROCESS)


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[float, float, float]:
    losses = [abs(a - b) / abs(b) for a, b in zip(found["losses"], wanted["losses"], strict=True)]

    def worst(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
        return max(relative_l2(torch.from_numpy(one[name]), torch.from_numpy(other[name])) for name in other)

    gradients = [worst(a, b) for a, b in zip(found["gradients"], wanted["gradients"], strict=True)]
    return max(losses), max(gradients), worst(found["changes"], wanted["changes"])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_branches_on_two_ranks_and_data_by_branches_on_four_make_the_updates_of_one_process(num_ranks, alone):
    for each in in_ranks(num_ranks, updates, branch_parallel=True):
        assert not isinstance(each, RankFailure), each.trace
        loss, gradient, change = differences(each, alone)
        assert (loss <= 1e-6, gradient <= 1e-4, change <= 1e-3) == (True, True, True), (loss, gradient, change)
        assert each["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        for one, other in zip(each["logged"], alone["logged"], strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
        assert each["evaluation"][0] == pytest.approx(alone["evaluation"][0], rel=1e-5)
        assert each["evaluation"][1] == pytest.approx(alone["evaluation"][1], rel=1e-5, abs=1e-5)


def test_pairs_spread_over_two_ranks_with_their_prefix_shared_make_the_same_updates(alone):
    for each in in_ranks(2, updates):
        assert not isinstance(each, RankFailure), each.trace
        loss, gradient, change = differences(each, alone)
        assert (loss <= 1e-6, gradient <= 1e-4, change <= 1e-3) == (True, True, True), (loss, gradient, change)


def test_planted_a_score_that_keeps_its_gradient_is_seen(alone):
    (first, *_) = in_ranks(2, updates, "the score of the other side keeps a gradient path", branch_parallel=True)
    assert isinstance(first, RankFailure) or differences(first, alone)[1] > 1e-2


def test_an_odd_number_of_ranks_cannot_hold_branches():
    for each in in_ranks(3, updates, branch_parallel=True):
        assert isinstance(each, RankFailure)
        assert "branch_parallel" in each.message
