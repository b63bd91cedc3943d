"""One and three SimPO updates against TRL's CPOTrainer on the same tokens and masks; reasons in docs/conformance.md."""

from __future__ import annotations

import json
import random
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conformance.our_run import GivenOrder, run_config, train_ours
from tests.conformance.pairs import PAIRS, UPDATES
from tests.tiny_models import tiny_language_model
from traceforge.config import SimpoObjective
from traceforge.errors import UsageError
from traceforge.oracles.cpo import trl_simpo
from traceforge.oracles.record import ConformanceRecord, compare_traces
from traceforge.oracles.trace import TrainingTrace
from traceforge.oracles.trainer import on_one_device
from traceforge.samples import branches
from traceforge.samples.branches import Pair
from traceforge.samples.tokens import Sample
from traceforge.training import methods

pytestmark = pytest.mark.usefixtures("one_thread")
Patch = pytest.MonkeyPatch


# A preference gradient is a difference of two sides that nearly cancel, so some weights' gradients are rounding noise,
# and Adam divides by the gradient's own size. An epsilon above the noise (1e-9) keeps them still.
EPSILON = 1e-6


def settings(objective=None, **optimizer):
    return run_config(
        objective={"method": "simpo", "beta": 2.5, "gamma_beta_ratio": 0.55, **(objective or {})},
        optimizer={"learning_rate": 2e-3, "weight_decay": 0.01, "epsilon": EPSILON, **optimizer},
        schedule={"kind": "linear"},
        training={"tokens_per_row": 110},
        data={"train": "none", "max_tokens": 48},
    )


def theirs_of(model, updates, config) -> TrainingTrace:
    return trl_simpo(
        model.model, updates, objective=config.objective, optimizer=config.optimizer, schedule=config.schedule
    )


def ours_of(model, updates, config) -> TrainingTrace:
    return train_ours(model, GivenOrder(updates), config, total_updates=len(updates), evaluated=PAIRS[4:6])


def compare_with_cpo(model, updates, config) -> ConformanceRecord:
    theirs = theirs_of(model, updates, config)  # of a copy; ours changes the model
    return compare_traces(ours_of(model, updates, config), theirs)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("num_updates", [1, 3])
def test_updates_equal_those_of_cpo_trainer(family, num_updates):
    record = compare_with_cpo(tiny_language_model(family), UPDATES[:num_updates], settings())
    assert record.status == "passed", (record.failed_checks, record.figures)
    allowed = record.tolerances
    assert (allowed["loss_relative_to_reward"], allowed["gradient_relative_l2"]) == (1e-6, 1e-4)
    assert (allowed["weight_change_relative_l2"], allowed["reward_relative"]) == (1e-3, 1e-6)
    assert record.checks.keys() >= {"losses", "gradients", "weight_changes", "log_probs", "rewards", "accuracy"}
    assert record.figures["samples_per_update"]["theirs"] == (3, 1, 3)[:num_updates]
    assert record.figures["trained_tensors"] == 28


@pytest.mark.parametrize(
    "objective",
    [{"label_smoothing": 0.1}, {"chosen_nll_weight": 0.3}, {"beta": 0.1, "gamma_beta_ratio": None, "gamma": 0.0}],
    ids=["label smoothing", "chosen nll", "no margin"],
)
def test_every_setting_of_the_objective_means_the_same(objective):
    record = compare_with_cpo(tiny_language_model("llama"), UPDATES[:2], settings(objective, max_gradient_norm=None))
    assert record.status == "passed", (record.failed_checks, record.figures)


@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_pairs_whose_sides_run_apart_agree_too(layout):
    record = compare_with_cpo(tiny_language_model("qwen3", attention=layout), UPDATES, settings())
    assert record.status == "passed", (record.failed_checks, record.figures)


def test_all_parameters_instead_of_an_adapter():
    record = compare_with_cpo(tiny_language_model("llama", adapter=False), UPDATES, settings())
    assert record.status == "passed", (record.failed_checks, record.figures)


def test_the_logged_figures_are_those_of_the_whole_update():
    """The two sides must not agree on something else: full logits of each sequence alone are a third witness."""
    model = tiny_language_model("llama")
    theirs = theirs_of(model, UPDATES, settings())
    model.base.set_attn_implementation("eager")
    with torch.no_grad():
        scores = [[_mean_logp(model.model, samples[0]) for samples in (p.chosen, p.rejected)] for p in UPDATES[0]]
    chosen, rejected = (np.array(side) for side in zip(*scores, strict=True))
    margins = 2.5 * (chosen - rejected)
    found = theirs.logged[0]
    assert found["chosen_logp"] == pytest.approx(chosen.mean(), abs=1e-5)
    assert found["rejected_reward"] == pytest.approx(2.5 * rejected.mean(), abs=1e-5)
    assert found["margin"] == pytest.approx(margins.mean(), abs=1e-5)
    assert found["accuracy"] == pytest.approx((margins > 0).mean())
    assert theirs.losses[0] == pytest.approx(np.log1p(np.exp(1.375 - margins)).mean(), abs=1e-5)
    assert 0 < found["accuracy"] < 1, "pairs must differ, or counting one of them would pass too"


def _mean_logp(network, sample) -> float:
    ids = torch.as_tensor(sample.token_ids_S)[None]
    length = ids.shape[1]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    logp = network(input_ids=ids, attention_mask=mask, use_cache=False).logits[0].log_softmax(-1)
    targets = np.flatnonzero(sample.weights_S)
    return float(logp[targets - 1, sample.token_ids_S[targets]].mean())


def test_the_oracle_leaves_network_random_generators_and_terminal_alone(capfd, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *a, **k: pytest.fail("usage report sent"))
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("network used"))
    model = tiny_language_model("llama")
    weights = {name: value.clone() for name, value in model.model.state_dict().items()}
    attention, modes = model.base.config._attn_implementation, [each.training for each in model.model.modules()]
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    padding = model.base.config.pad_token_id
    capfd.readouterr()
    theirs_of(model, UPDATES[:1], settings())
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert all(torch.equal(weights[name], value) for name, value in model.model.state_dict().items())
    assert [each.training for each in model.model.modules()] == modes
    assert (model.base.config._attn_implementation, model.base.config.pad_token_id) == (attention, padding)
    assert capfd.readouterr().out == ""


def test_the_trainer_sees_our_tokens_and_masks_and_makes_none_of_its_own(monkeypatch):
    from trl.experimental.cpo import CPOTrainer

    seen = []
    forward = CPOTrainer.concatenated_forward
    monkeypatch.setattr(CPOTrainer, "tokenize_row", lambda *a, **k: pytest.fail("tokenised again"))
    monkeypatch.setattr(
        CPOTrainer, "concatenated_forward", lambda self, model, batch: seen.append(batch) or forward(self, model, batch)
    )
    theirs_of(tiny_language_model("llama"), [PAIRS], settings())
    assert len(seen) == len(PAIRS)
    for batch, wanted in zip(seen, PAIRS, strict=True):
        for side, (sample,) in (("chosen", wanted.chosen), ("rejected", wanted.rejected)):
            assert batch[f"{side}_input_ids"][0].tolist() == sample.token_ids_S.tolist()
            assert (batch[f"{side}_labels"][0] != -100).tolist() == (sample.weights_S == 1).tolist()
            assert batch[f"{side}_attention_mask"].all()


def test_a_machine_with_several_gpus_does_not_spread_a_micro_batch_over_them(tmp_path):
    from trl.experimental.cpo import CPOConfig

    arguments = CPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True)
    arguments._n_gpu = 2
    assert arguments.train_batch_size == 2 * arguments.per_device_train_batch_size
    assert on_one_device(arguments).train_batch_size == arguments.per_device_train_batch_size


def test_the_record_is_plain_json():
    record = json.loads(json.dumps(compare_with_cpo(tiny_language_model("llama"), UPDATES[:1], settings()).as_dict()))
    assert record["framework_paths"] == {
        "traceforge": "traceforge.training.loop.train",
        "trl": "trl.experimental.cpo.CPOTrainer.train",
    }
    assert len(record["figures"]["logged"]["ours"]) == 1


def two_turns(prompt: int, first: int, answer: int, second: int, seed: int) -> tuple[Sample, Sample]:
    """Return an ending of two turns as two sequences, the second going on from the first and a tool's answer."""
    lengths = (prompt, first, answer, second)
    parts = [np.random.default_rng(seed + place).integers(0, 211, length) for place, length in enumerate(lengths)]
    parts[0] = np.random.default_rng(99).integers(0, 211, prompt)  # the same for both sides
    weights = [np.zeros(prompt + first), np.zeros(sum(lengths))]
    weights[0][prompt:] = weights[1][prompt + first + answer :] = 1.0
    ids = [np.concatenate(parts[:2]), np.concatenate(parts)]
    first_turn, second_turn = (
        Sample(f"{seed}/{n}", "g", "t", i, w) for n, (i, w) in enumerate(zip(ids, weights, strict=True))
    )
    return first_turn, second_turn


def test_endings_of_several_turns_that_continue_one_another_are_one_sequence():
    several = Pair("several", "g", "t", two_turns(12, 4, 5, 6, seed=200), two_turns(12, 7, 3, 4, seed=300))
    updates = [[several, PAIRS[0]]]
    record = compare_with_cpo(tiny_language_model("llama"), updates, settings())
    assert record.status == "passed", (record.failed_checks, record.figures)


def test_endings_whose_sequences_fork_are_refused_by_name():
    first, second = two_turns(12, 4, 5, 6, seed=200)
    ids_S = np.delete(second.token_ids_S, 13)  # the second turn is shown without a token of the first one's reasoning
    forked = (first, replace(second, token_ids_S=ids_S, weights_S=np.delete(second.weights_S, 13)))
    pair = replace(PAIRS[0], rejected=forked)
    with pytest.raises(UsageError, match=r"pair one turn each: the 2 sequences of its rejected side fork"):
        theirs_of(tiny_language_model("llama"), [[pair]], settings())
    twice = replace(PAIRS[0], rejected=(first, replace(first)))
    with pytest.raises(UsageError, match="token weight 2"):
        theirs_of(tiny_language_model("llama"), [[twice]], settings())


def test_what_labels_cannot_say_and_missing_pairs_are_refused_by_name():
    (sample,) = PAIRS[0].chosen
    weighted = replace(PAIRS[0], chosen=(replace(sample, weights_S=sample.weights_S * 0.5),))
    untrained = replace(PAIRS[0], chosen=(replace(sample, weights_S=sample.weights_S * 0),))
    model = tiny_language_model("llama")
    for updates, message in (([[weighted]], "token weight"), ([[untrained]], "no trained token"), ([[]], "one pair")):
        with pytest.raises(UsageError, match=message):
            theirs_of(model, updates, settings())
    warm = settings().model_copy(update={"schedule": settings().schedule.model_copy(update={"warmup_updates": 2})})
    with pytest.raises(UsageError, match="warmup_updates"):
        theirs_of(model, UPDATES, warm)


@pytest.mark.parametrize("library", ["trl", "datasets"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=library) as caught:
        theirs_of(tiny_language_model("llama"), UPDATES, settings())
    assert "pip install 'traceforge-train[oracle]'" in caught.value.hint


# --- planted bugs ---


def another_beta(patch: Patch) -> None:
    real = methods.simpo_loss
    patch.setattr(methods, "simpo_loss", lambda *scores, beta, **keywords: real(*scores, beta=2.0, **keywords))


def ratio_taken_as_gamma(patch: Patch) -> None:
    patch.setattr(SimpoObjective, "absolute_gamma", property(lambda self: self.gamma_beta_ratio))


def sums_instead_of_means(patch: Patch) -> None:
    patch.setattr(methods.Scores, "mean_P", property(lambda self: self.sum_P))


def _with_rejected(patch: Patch, change: Callable) -> None:
    """Let the rejected branches of every row pass through `change(chosen, rejected)`."""
    build = branches._pair_row

    def changed(pairs, share):
        row = build(pairs, share)
        return replace(row, rejected=tuple(change(c, r) for c, r in zip(row.chosen, row.rejected, strict=True)))

    patch.setattr(branches, "_pair_row", changed)


def a_shared_reply_token_counts_once(patch: Patch) -> None:
    def without(chosen, rejected):
        keep = ~np.isin(rejected.targets_B, chosen.targets_B)
        return branches.Branch(rejected.targets_B[keep], rejected.weights_B[keep])

    _with_rejected(patch, without)


def target_lost_at_the_fork(patch: Patch) -> None:
    _with_rejected(
        patch,
        lambda _, rejected: (
            branches.Branch(rejected.targets_B[1:], rejected.weights_B[1:]) if len(rejected.targets_B) > 1 else rejected
        ),
    )


def a_tools_answer_is_trained(patch: Patch) -> None:
    build = methods.build_pair_rows

    def trained(sample):
        weights_S = sample.weights_S.copy()
        weights_S[np.flatnonzero(weights_S)[0] :] = 1.0
        return replace(sample, weights_S=weights_S)

    def rows(pairs, **keywords):
        changed = [
            replace(each, chosen=tuple(map(trained, each.chosen)), rejected=tuple(map(trained, each.rejected)))
            for each in pairs
        ]
        return build(changed, **keywords)

    patch.setattr(methods, "build_pair_rows", rows)


def summed_over_pairs(patch: Patch) -> None:
    patch.setattr(methods.Simpo, "denominator", lambda self, items: 1.0)


def sides_swapped(patch: Patch) -> None:
    real = methods.simpo_loss
    patch.setattr(methods, "simpo_loss", lambda chosen, rejected, **keywords: real(rejected, chosen, **keywords))


BUGS: dict[Callable[[Patch], None], set[str]] = {
    another_beta: {"losses", "gradients", "weight_changes"},
    ratio_taken_as_gamma: {"losses", "gradients", "weight_changes"},
    sums_instead_of_means: {"losses", "gradients", "weight_changes", "log_probs", "rewards"},
    a_shared_reply_token_counts_once: {"losses", "gradients", "weight_changes", "log_probs", "rewards"},
    target_lost_at_the_fork: {"losses", "gradients", "weight_changes", "log_probs", "rewards"},
    a_tools_answer_is_trained: {"losses", "gradients", "weight_changes", "log_probs", "rewards"},
    summed_over_pairs: {"losses", "gradient_norms", "log_probs"},
    sides_swapped: {"losses", "gradients", "weight_changes", "accuracy"},
}


@pytest.fixture(scope="module")
def theirs() -> TrainingTrace:
    return theirs_of(tiny_language_model("llama"), UPDATES, settings())


def test_without_a_bug_they_agree(theirs):
    record = compare_traces(ours_of(tiny_language_model("llama"), UPDATES, settings()), theirs)
    assert record.status == "passed", (record.failed_checks, record.figures)


@pytest.mark.parametrize(("bug", "noticed_by"), BUGS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_the_comparison_reports_the_bug(bug, noticed_by, theirs, monkeypatch):
    model = tiny_language_model("llama")
    bug(monkeypatch)
    record = compare_traces(ours_of(model, UPDATES, settings()), theirs)
    assert record.status == "failed"
    assert noticed_by <= set(record.failed_checks), record.failed_checks
    # Not by a hair: each is off by ten times what is allowed.
    measured = {
        "losses": ("worst_loss_difference_relative_to_reward", "loss_relative_to_reward"),
        "gradients": ("first_gradient_relative_l2", "gradient_relative_l2"),
        "gradient_norms": ("worst_gradient_norm_difference", "gradient_norm_relative"),
        "weight_changes": ("worst_weight_change_relative_l2", "weight_change_relative_l2"),
        "log_probs": ("worst_log_prob_difference_nats", "log_prob_nats"),
        "rewards": ("worst_reward_difference_relative", "reward_relative"),
    }
    for check in noticed_by & measured.keys():
        figure, tolerance = measured[check]
        assert record.figures[figure] > 10 * record.tolerances[tolerance], check


@pytest.mark.parametrize("figure", ["chosen_logp", "rejected_reward", "margin", "accuracy"])
def test_what_is_not_a_number_never_agrees(figure, theirs):
    broken = replace(theirs, logged=(theirs.logged[0], {**theirs.logged[1], figure: float("nan")}, theirs.logged[2]))
    assert compare_traces(theirs, theirs).status == "passed"
    assert compare_traces(broken, theirs).status == "failed"
    assert compare_traces(theirs, broken).status == "failed"
    assert compare_traces(replace(theirs, logged=()), theirs).status == "failed"
