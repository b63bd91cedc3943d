"""Pairs as prefix trees give the loss and gradients of their branches run one by one in plain torch.

Tolerances as for samples: loss 1e-6, gradients 1e-4 relative L2 in float32; 1e-10 in float64. The loss is a difference
of two scores of about -6 nats times beta, so its tolerance is relative to the larger of loss and score.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from tests.tiny_models import gradients, tiny_language_model

from traceforge.config import DpoObjective, SimpoObjective
from traceforge.errors import ConfigError
from traceforge.oracles.record import relative_l2
from traceforge.samples import branches
from traceforge.samples.branches import Pair, build_pair_rows
from traceforge.samples.tokens import Sample
from traceforge.training import methods
from traceforge.training.evaluation import evaluate
from traceforge.training.methods import Dpo, Simpo
from traceforge.training.update import backward, plan_update

VOCABULARY = 211
SETTINGS = SimpoObjective(method="simpo", beta=2.5, gamma_beta_ratio=0.55)


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def sample(name: str, tokens: list[int], trained_from: int, weight: float = 1.0) -> Sample:
    weights = np.zeros(len(tokens))
    weights[trained_from:] = weight
    return Sample(name, "g", "t", np.array(tokens), weights)


def pair(name: str, chosen: list[Sample], rejected: list[Sample]) -> Pair:
    return Pair(name, name, "t", tuple(chosen), tuple(rejected))


P, A, B, C, D = (ids(seed, length) for seed, length in enumerate((20, 9, 7, 5, 6)))
SINGLE = pair("single", [sample("c", P + A, 20)], [sample("r", P + B, 20)])
CASES = {
    "one turn each": [SINGLE],
    "a reply token that both share": [pair("x", [sample("c", P + A, 20)], [sample("r", P + A[:4] + B, 20)])],
    "the chosen side is a prefix of the rejected": [pair("x", [sample("c", P + A[:5], 20)], [sample("r", P + A, 20)])],
    "replies of one token": [pair("x", [sample("c", [*P, 3], 20)], [sample("r", [*P, 5], 20)])],
    "no common beginning": [pair("x", [sample("c", A + B, 9)], [sample("r", C + D, 5)])],
    "several turns, each sequence its own, as when a template drops old reasoning": [
        pair(
            "x",
            [sample("c1", P + A, 20), sample("c2", P + A[4:] + C + D, 30), sample("c3", P + A[4:] + C + B, 32)],
            [sample("r1", P + B, 20), sample("r2", P + B[3:] + A, 24)],
        )
    ],
    "several pairs from one trajectory and one apart": [
        SINGLE,
        pair("second", [sample("c", P[:12] + C, 12)], [sample("r", P[:12] + D, 12)]),
        pair("third", [sample("c", D + A, 6)], [sample("r", D + B, 6)]),
        dataclasses.replace(SINGLE, pair_id="again"),
    ],
    "weights": [pair("x", [sample("c", P + A, 20, 0.5)], [sample("r", P + B, 20, 2.0)])],
}


@contextmanager
def plain_attention(model):
    name = model.base.config._attn_implementation
    model.base.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.base.set_attn_implementation(name)


def plain_scores(model, members: tuple[Sample, ...]) -> tuple[torch.Tensor, float]:
    """Return the sum of w * logp and the sum of w of a branch, each sample alone with full logits."""
    total, weight = torch.zeros((), dtype=model.dtype), 0.0
    for each in members:
        tokens = torch.as_tensor(each.token_ids_S)[None]
        length = tokens.shape[1]
        mask = torch.full((length, length), torch.finfo(model.dtype).min, dtype=model.dtype).triu(1)[None, None]
        logits = model.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[0]
        logp = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        weights = torch.as_tensor(each.weights_S[1:], dtype=logp.dtype)
        total = total + (weights * logp).sum()
        weight += float(weights.sum())
    return total, weight


def reference(model, pairs, formula):
    """Return the mean loss over pairs, its gradients and the largest score, by the plain path.

    `formula` maps the (sum, weight) of both sides to a loss.
    """
    model.model.zero_grad(set_to_none=True)
    with plain_attention(model):
        scores = [(plain_scores(model, each.chosen), plain_scores(model, each.rejected)) for each in pairs]
    largest = max(abs(float(total.detach())) / weight for both in scores for total, weight in both)
    loss = torch.stack([formula(chosen, rejected) for chosen, rejected in scores]).mean()
    loss.backward()
    found = gradients(model.model)
    model.model.zero_grad(set_to_none=True)
    return float(loss.detach()), found, largest


def simpo_formula(chosen, rejected, beta=2.5, gamma=1.375):
    z = beta * (chosen[0] / chosen[1] - rejected[0] / rejected[1]) - gamma
    return torch.log1p(torch.exp(-z))


def assert_same(model, pairs, method, formula, *, tokens_per_row=400, loss_tolerance=1e-6, gradient_tolerance=1e-4):
    wanted_loss, wanted, largest = reference(model, pairs, formula)
    loss = backward(model, plan_update(model, pairs, tokens_per_row=tokens_per_row, method=method))
    found = gradients(model.model)
    model.model.zero_grad(set_to_none=True)
    assert abs(loss - wanted_loss) <= loss_tolerance * max(abs(wanted_loss), largest)
    worst = max((relative_l2(found[name], wanted[name]), name) for name in wanted)
    assert worst[0] <= gradient_tolerance, worst
    return loss


@pytest.mark.parametrize(
    ("family", "layout"), [("llama", "tree"), ("qwen3", "tree"), ("qwen3", "packed"), ("qwen3", "plain")]
)
@pytest.mark.parametrize("pairs", CASES.values(), ids=CASES.keys())
def test_simpo_on_a_tree_is_simpo_on_its_branches(family, pairs, layout):
    model = tiny_language_model(family, attention=layout)
    loss = assert_same(model, pairs, Simpo(SETTINGS), simpo_formula)
    assert evaluate(model, pairs, tokens_per_row=400, method=Simpo(SETTINGS)).loss == pytest.approx(loss, rel=1e-5)


def test_in_float64_to_rounding():
    model = tiny_language_model("qwen3", dtype=torch.float64)
    for pairs in CASES.values():
        assert_same(model, pairs, Simpo(SETTINGS), simpo_formula, loss_tolerance=1e-10, gradient_tolerance=1e-10)


@pytest.mark.parametrize("tokens_per_row", [60, 75, 400])
def test_pairs_in_rows_of_any_length_give_the_same_update(tokens_per_row):
    pairs = CASES["several pairs from one trajectory and one apart"]
    model = tiny_language_model("llama")
    assert_same(model, pairs, Simpo(SETTINGS), simpo_formula, tokens_per_row=tokens_per_row)


def test_a_chosen_nll_term_adds_the_mean_negative_log_likelihood_of_the_chosen_side():
    model = tiny_language_model("llama")
    settings = SimpoObjective(method="simpo", beta=2.5, gamma=1.375, chosen_nll_weight=0.3)
    assert_same(model, [SINGLE], Simpo(settings), lambda c, r: simpo_formula(c, r) - 0.3 * c[0] / c[1])


def test_dpo_is_measured_against_the_adapter_it_started_from():
    model = tiny_language_model("llama")
    pairs = CASES["several turns, each sequence its own, as when a template drops old reasoning"]
    method = Dpo(DpoObjective(method="dpo", beta=0.3))
    with torch.no_grad():
        method.prepare(model, pairs, tokens_per_row=400)
        with plain_attention(model):
            start = [[plain_scores(model, s)[0].item() for s in (each.chosen, each.rejected)] for each in pairs]
        for _, parameter in model.trainable():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    method.prepare(model, pairs, tokens_per_row=400)  # already known: measured once, at the start

    def formula(chosen, rejected):
        z = 0.3 * ((chosen[0] - start[0][0]) - (rejected[0] - start[0][1]))
        return torch.log1p(torch.exp(-z))

    assert assert_same(model, pairs, method, formula) != pytest.approx(np.log(2), abs=1e-4)
    again = Dpo(DpoObjective(method="dpo", beta=0.3))
    again.restore(method.state())
    assert_same(model, pairs, again, formula)


def test_what_is_logged_are_means_over_pairs():
    model = tiny_language_model("llama")
    pairs = CASES["several pairs from one trajectory and one apart"]
    logged = evaluate(model, pairs, tokens_per_row=60, method=Simpo(SETTINGS)).logged
    with torch.no_grad(), plain_attention(model):
        scores = [[s / w for s, w in (plain_scores(model, e.chosen), plain_scores(model, e.rejected))] for e in pairs]
    margins = [2.5 * float(c - r) for c, r in scores]
    assert logged["margin"] == pytest.approx(np.mean(margins), rel=1e-4)
    assert logged["accuracy"] == pytest.approx(np.mean([m > 0 for m in margins]))
    assert logged["chosen_logp"] == pytest.approx(np.mean([float(c) for c, _ in scores]), rel=1e-5)
    assert logged["rejected_reward"] == pytest.approx(2.5 * np.mean([float(r) for _, r in scores]), rel=1e-5)
    assert logged["chosen_length"] == pytest.approx(np.mean([9, 5, 9, 9]))


def test_a_pair_that_does_not_fit_into_a_row_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"pair single has 36 tokens, training\.tokens_per_row is 35"):
        build_pair_rows([SINGLE], tokens_per_row=35)


# Planted bugs


def assert_differs(model, pairs, method=None):
    with pytest.raises(AssertionError):
        assert_same(model, pairs, method or Simpo(SETTINGS), simpo_formula)


def test_planted_a_shared_reply_token_counted_once_is_seen(monkeypatch):
    real = branches._pair_row

    def once(pairs, share):
        row = real(pairs, share)
        taken = set(row.chosen[0].targets_B.tolist())
        keep = [n for n, place in enumerate(row.rejected[0].targets_B.tolist()) if place not in taken]
        fewer = branches.Branch(row.rejected[0].targets_B[keep], row.rejected[0].weights_B[keep])
        return dataclasses.replace(row, rejected=(fewer,))

    monkeypatch.setattr(branches, "_pair_row", once)
    assert_differs(tiny_language_model("llama"), CASES["a reply token that both share"])


def test_planted_a_ratio_taken_as_gamma_is_seen():
    wrong = SimpoObjective(method="simpo", beta=2.5, gamma=0.55)
    assert_differs(tiny_language_model("llama"), [SINGLE], Simpo(wrong))


def test_planted_sums_instead_of_means_are_seen(monkeypatch):
    monkeypatch.setattr(methods.Scores, "mean_P", property(lambda self: self.sum_P))
    assert_differs(tiny_language_model("llama"), [SINGLE])


def test_planted_a_fork_target_lost_is_seen(monkeypatch):
    real = branches._pair_row

    def lost(pairs, share):
        row = real(pairs, share)
        first = row.rejected[0]
        return dataclasses.replace(row, rejected=(branches.Branch(first.targets_B[1:], first.weights_B[1:]),))

    monkeypatch.setattr(branches, "_pair_row", lost)
    assert_differs(tiny_language_model("llama"), [SINGLE])
