"""Each known kind of mistake, planted on purpose: both comparisons must report it, and neither may without it.

A comparison that has never disagreed proves nothing. The bugs stay here, so that a later change of the comparisons or
their tolerances cannot make one of them blind. (eos masked as padding and evaluation that leaves dropout off are
planted beside the code they concern.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from tests.agreement import update_difference
from tests.conformance.our_run import GivenOrder, run_config, train_ours
from tests.conformance.samples import SAMPLES, UPDATES
from tests.tiny_models import tiny_language_model
from traceforge.models import attention
from traceforge.models.language_model import LanguageModel
from traceforge.oracles.record import ConformanceRecord, compare_traces
from traceforge.oracles.trace import TrainingTrace
from traceforge.oracles.trl import trl_sft
from traceforge.training import loop, methods
from traceforge.training import update as update_module

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS_PER_ROW = 40
"""The longest sample: the first update needs several micro-batches."""
CONFIG = run_config(
    optimizer={"learning_rate": 2e-3},
    schedule={"kind": "linear"},
    training={"tokens_per_row": TOKENS_PER_ROW},
    data={"train": "none", "max_tokens": TOKENS_PER_ROW},
)
Patch = pytest.MonkeyPatch


def fresh_model() -> LanguageModel:
    return tiny_language_model("llama")


@pytest.fixture(scope="module")
def theirs() -> TrainingTrace:
    return trl_sft(fresh_model().model, UPDATES, optimizer=CONFIG.optimizer, schedule=CONFIG.schedule)


def against_trl(model: LanguageModel, theirs: TrainingTrace) -> ConformanceRecord:
    return compare_traces(train_ours(model, GivenOrder(UPDATES), CONFIG, total_updates=3), theirs)


# --- the bugs ---


def _with_rows(patch: Patch, change: Callable) -> None:
    """Let every row of the model pass through `change` before it is run."""
    build = LanguageModel.rows
    patch.setattr(
        LanguageModel,
        "rows",
        lambda self, samples, *, tokens_per_row: [
            change(row) for row in build(self, samples, tokens_per_row=tokens_per_row)
        ],
    )


def _with_plan(patch: Patch, plan: Callable) -> None:
    """Put `plan` in the place of `plan_update`, for the loop and for the measure of one update."""
    patch.setattr(update_module, "plan_update", plan)
    patch.setattr(loop, "plan_update", plan)


def target_read_at_its_own_position(patch: Patch) -> None:
    def shifted(row):
        own_T = np.arange(row.num_tokens)
        return replace(row, parents_T=np.where(row.parents_T >= 0, own_T, -1))

    _with_rows(patch, shifted)


def target_read_one_token_too_early(patch: Patch) -> None:
    def shifted(row):
        grandparents_T = row.parents_T[np.maximum(row.parents_T, 0)]
        return replace(row, parents_T=np.where(grandparents_T >= 0, grandparents_T, row.parents_T))

    _with_rows(patch, shifted)


def position_ids_off_by_one_after_the_first_token(patch: Patch) -> None:
    _with_rows(patch, lambda row: replace(row, depths_T=np.maximum(row.depths_T - 1, 0)))


def position_ids_do_not_go_back_at_a_fork(patch: Patch) -> None:
    _with_rows(patch, lambda row: replace(row, depths_T=np.arange(row.num_tokens)))


def a_sample_sees_its_neighbours(patch: Patch) -> None:
    def whole_row(module, query, key, value, attention_mask, scaling=None, **keywords):
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2), None

    AttentionInterface.register(attention.NAME, whole_row)


def mean_of_means(patch: Patch) -> None:
    plan = update_module.plan_update

    def planned(*arguments, **keywords):
        update = plan(*arguments, **keywords)
        return replace(update, denominator=float(len(update.rows)))

    _with_plan(patch, planned)
    patch.setattr(methods, "weighted_nll", lambda logp_N, weights_N: -(weights_N * logp_N).sum() / weights_N.sum())


def divided_by_the_micro_batches_once_more(patch: Patch) -> None:
    plan = update_module.plan_update

    def planned(*arguments, **keywords):
        update = plan(*arguments, **keywords)
        return replace(update, denominator=update.denominator * len(update.rows))

    _with_plan(patch, planned)


def schedule_moves_with_every_micro_batch(patch: Patch) -> None:
    rate, plan, run = loop.learning_rate, update_module.plan_update, []

    def planned(*arguments, **keywords):
        update = plan(*arguments, **keywords)
        run.append(len(update.rows))
        return update

    _with_plan(patch, planned)
    patch.setattr(
        loop,
        "learning_rate",
        lambda *arguments, update, total_updates: rate(*arguments, update=sum(run[:-1]), total_updates=total_updates),
    )


def last_token_of_every_turn_untrained(patch: Patch) -> None:
    plan = update_module.plan_update

    def without_last(sample):
        weights_S = sample.weights_S.copy()
        weights_S[np.flatnonzero(weights_S)[-1]] = 0.0
        return replace(sample, weights_S=weights_S)

    _with_plan(
        patch, lambda model, samples, **keywords: plan(model, [without_last(each) for each in samples], **keywords)
    )


def a_token_of_two_samples_counts_once(patch: Patch) -> None:
    _with_rows(patch, lambda row: replace(row, weights_T=np.minimum(row.weights_T, 1.0)))


# What each bug must be noticed by in the run against TRL; the gradient of one update shows all but the schedule.
BUGS: dict[Callable[[Patch], None], set[str]] = {
    target_read_at_its_own_position: {"losses", "gradient_norms", "weight_changes"},
    target_read_one_token_too_early: {"losses", "gradient_norms", "weight_changes"},
    position_ids_off_by_one_after_the_first_token: {"losses", "gradient_norms", "weight_changes"},
    position_ids_do_not_go_back_at_a_fork: {"losses", "gradient_norms", "weight_changes"},
    a_sample_sees_its_neighbours: {"losses", "gradient_norms", "weight_changes"},
    mean_of_means: {"losses", "gradient_norms", "weight_changes"},
    divided_by_the_micro_batches_once_more: {"losses", "gradient_norms"},
    schedule_moves_with_every_micro_batch: {"learning_rates", "weight_changes"},
    last_token_of_every_turn_untrained: {"losses", "gradient_norms", "weight_changes"},
    a_token_of_two_samples_counts_once: {"losses", "gradient_norms", "weight_changes"},
}


@pytest.fixture
def planted(request, monkeypatch):
    """A model made before the bug came, and the bug; taken out again afterwards."""
    model = fresh_model()
    request.param(monkeypatch)
    yield model
    attention.register()


def test_without_a_bug_both_comparisons_agree(theirs):
    assert len(fresh_model().rows(UPDATES[0], tokens_per_row=TOKENS_PER_ROW)) > 1
    record = against_trl(fresh_model(), theirs)
    assert record.status == "passed", record.figures
    for samples in UPDATES:
        found = update_difference(fresh_model(), samples, tokens_per_row=TOKENS_PER_ROW)
        assert found.agrees(), found


@pytest.mark.parametrize(
    ("planted", "noticed_by"), BUGS.items(), indirect=["planted"], ids=lambda value: getattr(value, "__name__", "")
)
def test_the_run_against_trl_reports_the_bug(planted, noticed_by, theirs):
    record = against_trl(planted, theirs)
    assert record.status == "failed"
    assert noticed_by <= set(record.failed_checks), record.failed_checks
    # Not by a hair: each is off by ten times what is allowed.
    measured = {
        "losses": ("worst_loss_difference_nats", "loss_nats"),
        "gradient_norms": ("worst_gradient_norm_difference", "gradient_norm_relative"),
        "learning_rates": ("worst_learning_rate_difference", "learning_rate_relative"),
        "weight_changes": ("worst_weight_change_relative_l2", "weight_change_relative_l2"),
    }
    for check in noticed_by:
        figure, tolerance = measured[check]
        assert record.figures[figure] > 10 * record.tolerances[tolerance], check


@pytest.mark.parametrize(
    "planted",
    [bug for bug in BUGS if bug is not schedule_moves_with_every_micro_batch],
    indirect=True,
    ids=lambda bug: bug.__name__,
)
def test_one_update_against_plain_samples_reports_the_bug(planted):
    found = update_difference(planted, SAMPLES[:4], tokens_per_row=TOKENS_PER_ROW)
    assert not found.agrees()
    assert found.gradient > 100 * 1e-4


def test_an_update_after_every_micro_batch_is_reported(theirs, monkeypatch):
    """No boundary at all: every row is an update of its own."""
    step = update_module.apply_update

    def each_row(model, update, *arguments, **keywords):
        results = [step(model, replace(update, rows=(row,)), *arguments, **keywords) for row in update.rows]
        return replace(results[-1], loss=sum(result.loss for result in results))

    monkeypatch.setattr(loop, "apply_update", each_row)
    record = against_trl(fresh_model(), theirs)
    assert {"no_change_inside_an_update", "weight_changes"} <= set(record.failed_checks)


def test_an_update_that_changes_nothing_cannot_pass(theirs, monkeypatch):
    monkeypatch.setattr(loop, "set_learning_rate", lambda optimizer, rate: None)
    config = CONFIG.model_copy(update={"optimizer": CONFIG.optimizer.model_copy(update={"learning_rate": 1e-300})})
    ours = train_ours(fresh_model(), GivenOrder(UPDATES), config, total_updates=3)
    record = compare_traces(ours, theirs)
    assert "every_update_changed_the_weights" in record.failed_checks
    assert "every_update_changed_the_weights" in compare_traces(ours, ours).failed_checks


def test_the_start_up_self_test_refuses_attention_that_leaks(monkeypatch):
    """The same bug on a user's machine: the model is not admitted to shared rows."""
    from traceforge.errors import DisagreementError

    monkeypatch.setattr(attention, "register", lambda: a_sample_sees_its_neighbours(monkeypatch))
    try:
        with pytest.raises(DisagreementError, match="self-test"):
            tiny_language_model("llama", attention="tree")
        model = tiny_language_model("llama", attention="auto")
        assert model.layout == "plain"
    finally:
        monkeypatch.undo()
        attention.register()


@pytest.mark.parametrize("place", ["loss", "weights"])
def test_what_is_not_a_number_never_agrees(place, theirs):
    """Comparisons with NaN are false, and a maximum may pass over it."""
    if place == "loss":
        broken = replace(theirs, losses=(theirs.losses[0], float("nan"), theirs.losses[2]))
    else:
        name = next(iter(theirs.weights_before))
        changed = {**theirs.weights_after[1], name: torch.full_like(theirs.weights_after[1][name], float("nan"))}
        broken = replace(theirs, weights_after=(theirs.weights_after[0], changed, theirs.weights_after[2]))
    assert compare_traces(theirs, theirs).status == "passed"
    assert compare_traces(broken, theirs).status == "failed"
    assert compare_traces(theirs, broken).status == "failed"


def test_runs_of_different_tensors_or_lengths_never_agree(theirs):
    fewer = dict(list(theirs.weights_before.items())[1:])
    assert compare_traces(replace(theirs, weights_before=fewer), theirs).status == "failed"
    shorter = replace(theirs, losses=theirs.losses[:2], weights_after=theirs.weights_after[:2])
    assert compare_traces(shorter, theirs).status == "failed"
    empty = replace(theirs, losses=(), gradient_norms=(), learning_rates=(), samples_per_update=(), weights_after=())
    assert compare_traces(empty, empty).status == "failed"
