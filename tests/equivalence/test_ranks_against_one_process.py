"""Data-parallel training on real gloo ranks against one process: the same updates, whoever runs which sample.

The reference is the same loop in this process, which other tests hold against plain torch. Samples are turns of
trajectories of unequal length with random weights, so ranks differ in samples, tokens and trained tokens.

Tolerances (float32): loss 1e-6 relative, gradient 1e-4 relative L2, weight changes after 3 updates 1e-3 relative L2:
sums in another order. A planted bug lies orders of magnitude above them.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.ranks import RankFailure, in_ranks
from tests.tiny_models import tiny_language_model

from traceforge.config import RunConfig
from traceforge.parallel.world import ONE_PROCESS, World
from traceforge.samples.dataset import WeightedSamples
from traceforge.samples.tokens import Sample
from traceforge.training import evaluation, loop, update
from traceforge.training.clock import Clock
from traceforge.training.interrupts import StopRequest
from traceforge.training.optimizer import build_optimizer
from traceforge.training.order import UpdateOrder
from traceforge.training.progress import RunProgress

pytestmark = pytest.mark.usefixtures("one_thread")

LOSS, GRADIENT, CHANGE = 1e-6, 1e-4, 1e-3


def trajectories(*num_turns: int, vocabulary: int = 211) -> list[Sample]:
    """Return turns of trajectories with these numbers of turns: each turn's history is the one before it."""
    generator = np.random.default_rng(5)
    samples = []
    for number, turns in enumerate(num_turns):
        history = generator.integers(0, vocabulary, 12 + 5 * number)
        for turn in range(turns):
            history = np.concatenate([history, generator.integers(0, vocabulary, int(generator.integers(4, 14)))])
            weights = np.zeros(history.size)
            weights[-int(generator.integers(2, 4)) :] = generator.choice([0.5, 1.0, 2.0])
            name = f"t{number}"
            samples.append(Sample(f"{name}#{turn}", name, name, history.astype(np.int64), weights))
    return samples


def run_config(**training: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": "tiny", "dtype": "float32"},
            "data": {"train": "none", "max_tokens": 128},
            "optimizer": {"learning_rate": 3e-3, "max_gradient_norm": 0.05, "weight_decay": 0.1},
            "schedule": {"kind": "linear"},
            "training": {"updates": 3, "samples_per_update": 4, "tokens_per_row": 150, **training},
        }
    )


class Lines:
    """Stands where the recorder stands."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def update(self, line: dict[str, Any]) -> None:
        self.updates.append(line)

    def evaluation(self, line: dict[str, Any]) -> None:
        self.evaluations.append(line)


def followed(
    world: World, samples: list[Sample], *, family: str = "llama", attention: str = "tree", scaled: bool = False
) -> dict[str, Any]:
    """Train three updates by the real loop and return all that must be equal in any number of ranks."""
    model, config, lines = tiny_language_model(family, attention=attention), run_config(), Lines()
    if world.rank:  # a rank that starts from other weights is put right by rank 0's
        for _, parameter in model.trainable():
            parameter.data.add_(1.0)
    world.broadcast([parameter for _, parameter in model.trainable()])
    before = {name: parameter.detach().clone() for name, parameter in model.trainable()}
    gradients: list[dict[str, np.ndarray]] = []
    optimizer = build_optimizer(model.trainable(), config.optimizer)
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({name: p.grad.detach().numpy().copy() for name, p in model.trainable()})
    )
    job = loop.Job(
        config=config,
        model=model,
        optimizer=optimizer,
        order=UpdateOrder([WeightedSamples("-", 1.0, tuple(samples))], items_per_update=4, seed=1),
        sets={"train": tuple(samples[:6]), "evaluation": tuple(samples[:1])},
        passes=None,
        total_updates=3,
        clock=Clock(),
        recorder=lines,
        progress=RunProgress(Console(file=io.StringIO())),
        scaler=torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None,
        world=world,
    )
    loop.measure(job)
    loop.train(job)
    loop.measure(job)
    timed = {"seconds", "tokens_per_s", "peak_bytes"}
    return {
        "losses": job.update_losses,
        "norms": [line["gradient_norm"] for line in lines.updates],
        "lines": [{key: value for key, value in line.items() if key not in timed} for line in lines.updates],
        "evaluations": [line["loss"] for line in lines.evaluations],
        "evaluated": [(line["trained_tokens"], line["rows"]) for line in lines.evaluations],
        "gradients": gradients,
        "changes": {name: (p.detach() - before[name]).numpy() for name, p in model.trainable()},
        "own_share": [len(update.own_share(model, items, world)) for _, _, items in job.order.updates(passes=1)],
    }


def relative(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Return the largest relative L2 difference over all tensors."""
    assert found.keys() == wanted.keys()
    return max(float(np.linalg.norm(found[name] - each) / np.linalg.norm(each)) for name, each in wanted.items())


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[float, float, float]:
    """Return how far two runs lie apart: losses, gradients (clipped, as the optimizer saw them), weight changes."""
    losses = [abs(a - b) / abs(b) for a, b in zip(found["losses"], wanted["losses"], strict=True)]
    gradients = [relative(a, b) for a, b in zip(found["gradients"], wanted["gradients"], strict=True)]
    return max(losses), max(gradients), relative(found["changes"], wanted["changes"])


def well(results: list[Any]) -> list[Any]:
    for result in results:
        assert not isinstance(result, RankFailure), result.trace
    return results


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return trajectories(3, 5, 2, 4, 1)


@pytest.fixture(scope="module")
def alone(samples) -> dict[str, Any]:
    return followed(ONE_PROCESS, samples)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_make_the_updates_of_one_process(num_ranks, samples, alone):
    results = well(in_ranks(num_ranks, followed, samples))
    assert sum(sum(each["own_share"]) for each in results) == sum(alone["own_share"]) == len(samples)
    for each in results:
        loss, gradient, change = differences(each, alone)
        assert (loss <= LOSS, gradient <= GRADIENT, change <= CHANGE) == (True, True, True), (loss, gradient, change)
        assert each["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert max(alone["norms"]) > 0.05, "clipping must bite, or its place proves nothing"
        assert [line["learning_rate"] for line in each["lines"]] == [line["learning_rate"] for line in alone["lines"]]
        for name in ("samples", "trained_tokens", "update", "skipped"):
            assert [line[name] for line in each["lines"]] == [line[name] for line in alone["lines"]]
        assert each["evaluations"] == pytest.approx(alone["evaluations"], rel=1e-6)
        assert each["evaluated"] == alone["evaluated"]
    assert len({str(each["lines"]) for each in results}) == 1, "every rank logs the numbers of the whole update"
    assert len({each["changes"][name].tobytes() for name in alone["changes"] for each in results}) == len(
        alone["changes"]
    ), "every rank holds the same bits"


def test_another_family_and_another_layout_too(samples):
    one = _qwen3_without_trees(ONE_PROCESS, samples)
    for each in well(in_ranks(2, _qwen3_without_trees, samples)):
        loss, gradient, change = differences(each, one)
        assert (loss <= LOSS, gradient <= GRADIENT, change <= CHANGE) == (True, True, True), (loss, gradient, change)


def _qwen3_without_trees(world, samples):
    return followed(world, samples, family="qwen3", attention="plain")


def test_three_samples_on_four_ranks_and_a_rank_that_never_has_one():
    few = trajectories(1, 1, 1)
    one = followed(ONE_PROCESS, few)
    results = well(in_ranks(4, followed, few))
    assert sorted(sum(each["own_share"]) for each in results) == [0, 1, 1, 1]
    for each in results:
        loss, gradient, change = differences(each, one)
        assert (loss <= LOSS, gradient <= GRADIENT, change <= CHANGE) == (True, True, True), (loss, gradient, change)
        # The set of one sample is measured by one rank, and its loss belongs to all.
        assert each["evaluations"] == pytest.approx(one["evaluations"], rel=1e-6)


def test_loss_scaling_works_where_a_rank_has_nothing_to_scale():
    few = trajectories(1)
    one = followed(ONE_PROCESS, few)
    for each in well(in_ranks(2, _scaled, few)):
        loss, gradient, change = differences(each, one)
        assert (loss <= LOSS, gradient <= GRADIENT, change <= CHANGE) == (True, True, True), (loss, gradient, change)


def _scaled(world, samples):
    return followed(world, samples, scaled=True)


# --- Planted bugs: each of them is seen.


class Averaging:
    """A world whose gradients are means over the ranks, as DDP makes them."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def sum_gradients(self, parameters: Any) -> None:
        self._world.sum_gradients(parameters)
        for parameter in parameters:
            parameter.grad /= self._world.size


class ClippingFirst(Averaging):
    """A world that clips each rank's own gradient before the sum."""

    def sum_gradients(self, parameters: Any) -> None:
        if any(parameter.grad is not None for parameter in parameters):
            update.clip_gradient(parameters, 0.05)
        self._world.sum_gradients(parameters)


class MeansOfRanks(Averaging):
    """A world that takes the mean of the ranks' numbers for their sum."""

    def sum_numbers(self, numbers: Any) -> list[float]:
        return [each / self._world.size for each in self._world.sum_numbers(numbers)]


class Keeping(Averaging):
    """A world that does not sum gradients at all, as when a forward pass goes around the wrapper of DDP."""

    def sum_gradients(self, parameters: Any) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def _with_bug(world, samples, bug):
    return followed(bug(world), samples)


def test_a_mean_of_gradients_is_seen(samples, alone):
    # In the norm: clipping that bites hides a constant factor from the gradient, and Adam hides it from the weights.
    for each in well(in_ranks(2, _with_bug, samples, Averaging)):
        assert each["norms"] == pytest.approx([norm / 2 for norm in alone["norms"]], rel=1e-3)


def test_clipping_before_the_sum_is_seen(samples, alone):
    for each in well(in_ranks(2, _with_bug, samples, ClippingFirst)):
        _, gradient, change = differences(each, alone)
        assert gradient > 50 * GRADIENT
        assert change > CHANGE


def test_losses_of_which_the_mean_is_taken_are_seen(samples, alone):
    for each in well(in_ranks(2, _with_bug, samples, MeansOfRanks)):
        loss, _, _ = differences(each, alone)
        assert loss == pytest.approx(0.5, abs=1e-6)
        assert each["evaluations"] == pytest.approx([value / 2 for value in alone["evaluations"]], rel=1e-6)


def test_ranks_that_drift_apart_are_named_after_the_first_update(samples):
    for each in in_ranks(2, _with_bug, samples, Keeping):
        assert each.error_type == "DisagreementError"
        assert "rank" in each.message


# --- Numbers worked out by hand.


def hundred_and_three_hundred(world) -> tuple[float, float]:
    """Rank 0 has 100 trained tokens with a mean loss of 1.0, rank 1 has 300 with 2.0; the gradient equals the loss."""
    weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    tokens, mean = ((100, 1.0), (300, 2.0))[world.rank]
    loss = weight * mean * tokens / 400
    loss.backward()
    world.sum_gradients([weight])
    return world.sum_numbers([float(loss)])[0], float(weight.grad)


def test_every_token_counts_the_same_whatever_rank_it_is_on():
    assert in_ranks(2, hundred_and_three_hundred) == [(1.75, 1.75)] * 2  # not 1.5, 3.5 or 0.875


# --- What every rank must do alike.


def one_rank_not_finite(world, samples):
    model, config = tiny_language_model(), run_config()
    optimizer = build_optimizer(model.trainable(), config.optimizer)
    before = [parameter.detach().clone() for _, parameter in model.trainable()]
    planned = update.plan_update(model, samples, tokens_per_row=150, world=world)
    row_logprobs = model.row_logprobs
    if world.rank == 1:
        model.row_logprobs = lambda row: (row_logprobs(row)[0] * math.inf, row_logprobs(row)[1])
    result = update.apply_update(model, planned, optimizer, max_gradient_norm=1.0, world=world)
    same = all(torch.equal(a, b) for a, (_, b) in zip(before, model.trainable(), strict=True))
    return result.skipped, same, bool(optimizer.state)


def test_a_gradient_that_is_not_finite_on_one_rank_makes_all_ranks_skip(samples):
    assert well(in_ranks(2, one_rank_not_finite, samples)) == [(True, True, False)] * 2


def asked_on_rank_1_only(world):
    stop = StopRequest()
    stop.finish_update = True
    if world.rank == 1:
        stop._handle(15, None)
    return stop.heed(world.sum_numbers(stop.votes())), stop.number


def test_a_signal_to_one_rank_stops_all_ranks_after_the_same_update():
    assert in_ranks(2, asked_on_rank_1_only) == [(True, 15)] * 2


def measured(world, samples):
    model = tiny_language_model()
    untrained = Sample("none#0", "none", "none", samples[0].token_ids_S, np.zeros(samples[0].num_tokens))
    found = evaluation.evaluate(model, [*samples, untrained], tokens_per_row=150, world=world)
    return found.loss, found.trained_tokens, found.rows, found.rows_without_targets


def test_an_evaluation_on_two_ranks_is_the_one_of_one_rank(samples):
    one = measured(ONE_PROCESS, samples)
    for each in well(in_ranks(2, measured, samples)):
        assert each[0] == pytest.approx(one[0], rel=1e-6)
        assert each[1:] == one[1:] == (one[1], len(samples) + 1, 1)
