"""The update's arithmetic against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from traceforge.samples.prefix_tree import build_rows
from traceforge.samples.rows import Row
from traceforge.samples.tokens import Sample
from traceforge.training.update import Update, apply_update, backward, clip_gradient


class ConstantLossModel:
    """Stands in for a language model: every trained token of a row has the loss that the row's first token id says.

    Token id `k` stands for a loss of `k / 1000` nats; the one trained weight `w` is 1 and multiplies it.
    """

    def __init__(self):
        self.model = nn.Module()
        self.model.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def trainable(self):
        return [("w", self.model.w)]

    def row_logprobs(self, row):
        targets = row.targets_N()
        logp = -self.model.w * torch.full((len(targets),), float(row.token_ids_T[0]) / 1000, dtype=torch.float64)
        return logp, torch.as_tensor(row.weights_T[targets])


def row(num_trained: int, loss: float) -> Row:
    ids = np.full(num_trained + 1, round(loss * 1000))
    weights = np.ones(num_trained + 1)
    weights[0] = 0.0
    (built,) = build_rows([Sample("s", "s", "s", ids, weights)], tokens_per_row=num_trained + 1)
    return built


def untrained_row() -> Row:
    (built,) = build_rows([Sample("n", "n", "n", np.zeros(5, dtype=int), np.zeros(5))], tokens_per_row=5)
    return built


def update_of(*rows: Row) -> Update:
    return Update(tuple(rows), len(rows), sum(each.total_weight for each in rows))


def test_every_token_counts_the_same_whatever_micro_batch_it_is_in():
    model = ConstantLossModel()
    loss = backward(model, update_of(row(10, 2.0), row(30, 1.0), row(60, 0.5)))
    assert loss == pytest.approx(0.8, abs=1e-12)  # mean of means 1.1667, sum 3.5, divided twice 0.2667
    assert model.model.w.grad.item() == pytest.approx(0.8, abs=1e-12)


def test_a_micro_batch_with_nothing_trained_changes_nothing():
    model = ConstantLossModel()
    loss = backward(model, update_of(row(10, 2.0), row(30, 1.0), row(60, 0.5), untrained_row()))
    assert loss == pytest.approx(0.8, abs=1e-12)
    assert model.model.w.grad.item() == pytest.approx(0.8, abs=1e-12)


@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_the_same_rows_in_any_number_of_micro_batches_give_the_same_loss(split):
    samples = [row(5 + number, 0.25 * (number + 1)) for number in range(8)]
    model = ConstantLossModel()
    whole = update_of(*samples)
    parts = [Update(whole.rows[start::split], 1, whole.denominator) for start in range(split)]
    assert sum(backward(model, part) for part in parts) == pytest.approx(
        sum((5 + n) * 0.25 * (n + 1) for n in range(8)) / sum(5 + n for n in range(8)), abs=1e-12
    )


def test_clipping_sees_the_gradient_of_the_whole_update():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradient([first, second], 1.0) == pytest.approx(5.0)
    assert first.grad.item() == pytest.approx(0.6, rel=1e-5)
    assert second.grad.item() == pytest.approx(0.8, rel=1e-5)
    assert clip_gradient([first, second], None) == pytest.approx(1.0, rel=1e-5)
    assert first.grad.item() == pytest.approx(0.6, rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_update_that_is_not_finite_leaves_weights_and_optimizer_alone(bad):
    model = ConstantLossModel()
    optimizer = torch.optim.AdamW([model.model.w], lr=0.1)
    good = update_of(row(10, 2.0))
    apply_update(model, good, optimizer, max_gradient_norm=1.0)
    weight, moment = model.model.w.item(), optimizer.state[model.model.w]["exp_avg"].clone()

    class Broken(ConstantLossModel):
        def row_logprobs(self, each):
            logp, weights = super().row_logprobs(each)
            return logp * bad, weights

    broken = Broken()
    broken.model = model.model
    result = apply_update(broken, good, optimizer, max_gradient_norm=1.0)
    assert result.skipped
    assert model.model.w.item() == weight
    assert torch.equal(optimizer.state[model.model.w]["exp_avg"], moment)
    assert model.model.w.grad is None


def test_loss_scaling_does_not_change_the_update():
    results = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = ConstantLossModel()
        optimizer = torch.optim.SGD([model.model.w], lr=0.1)
        result = apply_update(
            model, update_of(row(10, 2.0), row(30, 1.0)), optimizer, max_gradient_norm=None, scaler=scaler
        )
        results.append((result.loss, result.gradient_norm, model.model.w.item()))
    assert results[0] == pytest.approx(results[1], abs=1e-9)
