"""SimPO and DPO against numbers worked out by hand, and against automatic differentiation of the formula."""

from __future__ import annotations

import math

import pytest
import torch

from traceforge.objectives.dpo import dpo_loss
from traceforge.objectives.simpo import simpo_loss

CHOSEN, REJECTED = torch.tensor([-0.2, -0.4, -0.6]), torch.tensor([-1.0, -1.4])
BETA, GAMMA = 2.5, 1.375


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def loss_of(chosen, rejected, **changes):
    return simpo_loss(leaf(chosen), leaf(rejected), **{"beta": BETA, "gamma": GAMMA, **changes})[0].item()


def test_the_pair_worked_out_by_hand():
    chosen, rejected = leaf(CHOSEN.double().mean().item()), leaf(REJECTED.double().mean().item())
    loss, margin = simpo_loss(chosen, rejected, beta=BETA, gamma=GAMMA)
    assert loss.item() == pytest.approx(0.428701, abs=1e-6)
    assert margin.item() == pytest.approx(2.0, abs=1e-6)
    loss.backward()
    assert chosen.grad.item() == pytest.approx(-0.871613, abs=1e-6)
    assert rejected.grad.item() == pytest.approx(0.871613, abs=1e-6)


@pytest.mark.parametrize(
    ("mistake", "wrong"),
    [
        ("the ratio taken as gamma", loss_of(-0.4, -1.2, gamma=0.55)),
        ("no margin", loss_of(-0.4, -1.2, gamma=0.0)),
        ("sums instead of means", loss_of(-1.2, -2.4)),
        ("divided by n - 1", loss_of(-0.6, -2.4)),
    ],
)
def test_the_usual_mistakes_give_other_numbers(mistake, wrong):
    expected = {
        "the ratio taken as gamma": 0.210723,
        "no margin": 0.126928,
        "sums instead of means": 0.179745,
        "divided by n - 1": 0.042999,
    }
    assert wrong == pytest.approx(expected[mistake], abs=1e-6)
    assert abs(wrong - 0.428701) > 0.1


def test_label_smoothing():
    assert loss_of(-0.4, -1.2, label_smoothing=0.1) == pytest.approx(0.491201, abs=1e-6)


def test_the_loss_falls_when_the_margin_grows():
    assert loss_of(-0.4, -1.2) == pytest.approx(0.4287, abs=1e-4)  # z = 0.625
    assert loss_of(-0.4, -1.6) == pytest.approx(0.1797, abs=1e-4)  # z = 1.625


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("z", [10_000.0, -10_000.0])
def test_extreme_margins_stay_finite_and_right(z, dtype):
    chosen = torch.tensor([z], dtype=dtype, requires_grad=True)
    loss, _ = simpo_loss(chosen, torch.zeros(1, dtype=dtype), beta=1.0, gamma=0.0)
    loss.backward()
    assert loss.item() == pytest.approx(max(-z, 0.0))
    assert chosen.grad.item() == pytest.approx(-1.0 if z < 0 else 0.0)


def test_the_loss_is_a_sum_over_pairs():
    one = simpo_loss(leaf(-0.4), leaf(-1.2), beta=BETA, gamma=GAMMA)[0].item()
    other = simpo_loss(leaf(-2.0), leaf(-0.7), beta=BETA, gamma=GAMMA)[0].item()
    both = simpo_loss(leaf(-0.4, -2.0), leaf(-1.2, -0.7), beta=BETA, gamma=GAMMA)[0].item()
    assert both == pytest.approx(one + other)


def test_dpo_is_log_two_at_the_reference_and_follows_its_formula():
    chosen, rejected = leaf(-3.0, -1.0), leaf(-2.0, -4.0)
    at_reference, margin = dpo_loss(chosen, rejected, chosen.detach(), rejected.detach(), beta=0.1)
    assert at_reference.item() == pytest.approx(2 * math.log(2))
    assert margin.tolist() == [0.0, 0.0]
    loss, margin = dpo_loss(leaf(-3.0), leaf(-2.0), leaf(-3.5).detach(), leaf(-1.0).detach(), beta=2.0)
    assert margin.item() == pytest.approx(2.0 * (0.5 + 1.0))
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-3.0)))


def test_vectors_of_two_lengths_are_refused():
    with pytest.raises(ValueError, match=r"\(1,\), \(2,\)"):
        simpo_loss(leaf(0.0), leaf(0.0, 1.0), beta=1.0, gamma=0.0)
