"""Evaluation: token-weighted, independent of packing, and without a trace."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from tests.tiny_models import random_samples, reference_loss, tiny_language_model

from traceforge.errors import EvaluationError
from traceforge.samples.tokens import Sample
from traceforge.training.evaluation import evaluate, fixed_part


class StubModel:
    """Gives each sample the loss that its first token id says, in thousandths of a nat."""

    def __init__(self):
        self.model = torch.nn.Linear(1, 1)

    def rows(self, samples, *, tokens_per_row):
        return list(samples)

    def row_logprobs(self, sample):
        count = sample.num_trained_tokens
        return torch.full((count,), -float(sample.token_ids_S[0]) / 1000), torch.ones(count)


def stub_sample(trained: int, loss: float) -> Sample:
    weights = np.ones(trained + 1)
    weights[0] = 0
    return Sample(f"{trained}", "g", "t", np.full(trained + 1, round(loss * 1000)), weights)


def test_the_loss_is_weighted_by_tokens_and_rows_without_targets_are_counted():
    nothing = Sample("none", "g", "t", np.zeros(4, dtype=int), np.zeros(4))
    result = evaluate(StubModel(), [stub_sample(1, 4.0), stub_sample(99, 1.0), nothing], tokens_per_row=200)
    assert result.loss == pytest.approx(1.03, abs=1e-6)
    assert math.exp(result.loss) == pytest.approx(2.801066, abs=1e-5)
    assert (result.trained_tokens, result.rows, result.rows_without_targets) == (100, 3, 1)


def test_a_set_without_any_trained_token_is_an_error():
    nothing = Sample("none", "g", "t", np.zeros(4, dtype=int), np.zeros(4))
    with pytest.raises(EvaluationError, match="no trained token"):
        evaluate(StubModel(), [nothing], tokens_per_row=10)


@pytest.mark.parametrize("tokens_per_row", [40, 90, 400])
def test_the_loss_does_not_depend_on_how_samples_fall_into_rows(tokens_per_row):
    model = tiny_language_model("qwen3", attention="tree")
    samples = random_samples([40, 7, 31, 12, 25], weighted=True)
    with torch.no_grad():
        wanted = float(reference_loss(tiny_language_model("qwen3", attention="plain").model, samples))
    assert evaluate(model, samples, tokens_per_row=tokens_per_row).loss == pytest.approx(wanted, rel=1e-6)


def states(model):
    return (
        [module.training for module in model.model.modules()],
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].copy(),
        {name: parameter.grad.clone() for name, parameter in model.trainable()},
    )


def assert_same_states(before, after):
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]
    assert np.array_equal(before[3], after[3])
    assert before[4].keys() == after[4].keys()
    assert all(torch.equal(before[4][name], after[4][name]) for name in before[4])


@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_leaves_no_trace_even_when_it_fails(fails, monkeypatch):
    model = tiny_language_model("llama", dropout=0.3, attention="packed")
    model.model.train()
    model.base.base_model.norm.eval()  # a mixed state, to be put back as it was
    for _, parameter in model.trainable():
        parameter.grad = torch.full_like(parameter, 0.5)
    real = type(model).row_logprobs

    def noisy(self, row):
        torch.rand(3), random.random(), np.random.rand()
        assert not any(module.training for module in self.model.modules())
        assert not torch.is_grad_enabled()
        if fails:
            raise RuntimeError("in the middle")
        return real(self, row)

    monkeypatch.setattr(type(model), "row_logprobs", noisy)
    before = states(model)
    if fails:
        with pytest.raises(RuntimeError, match="in the middle"):
            evaluate(model, random_samples([9, 5]), tokens_per_row=20)
    else:
        evaluate(model, random_samples([9, 5]), tokens_per_row=20)
    assert_same_states(before, states(model))


def test_dropout_is_on_again_after_an_evaluation():
    """Planted once: without putting the flags back, every update after the first evaluation loses its dropout."""
    model = tiny_language_model("llama", dropout=0.5, attention="packed")
    model.model.train()
    samples = random_samples([12])
    (row,) = model.rows(samples, tokens_per_row=12)
    evaluate(model, samples, tokens_per_row=12)
    one, other = (model.row_logprobs(row)[0].detach() for _ in range(2))
    assert not torch.equal(one, other)


def test_a_fixed_part_is_chosen_by_seed_and_id_alone():
    samples = random_samples([4] * 20)
    chosen = fixed_part(samples, 5, seed=1)
    assert len(chosen) == 5
    assert {s.sample_id for s in chosen} == {s.sample_id for s in fixed_part(samples[::-1], 5, seed=1)}
    assert {s.sample_id for s in chosen} != {s.sample_id for s in fixed_part(samples, 5, seed=2)}
    assert len(fixed_part(samples + samples, 100, seed=1)) == 20
