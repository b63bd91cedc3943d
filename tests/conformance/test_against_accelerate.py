"""The update clock against Accelerate's gradient accumulation: windows, boundaries, schedule and final weights.

The numbers are worked out by hand: 9 micro-batches, 4 an update, 2 passes, windows do not cross passes.
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests.conformance.our_run import run_config, train_ours, update_order
from tests.conformance.samples import SAMPLES
from tests.tiny_models import tiny_language_model
from traceforge.errors import UsageError
from traceforge.oracles.accelerate import accelerate_sft
from traceforge.oracles.record import Tolerances, compare_traces
from traceforge.oracles.watch import RunWatch

pytestmark = pytest.mark.usefixtures("one_thread")

RATES = (1e-4, 8.3333e-5, 6.6667e-5, 5e-5, 3.3333e-5, 1.6667e-5)
CONFIG = run_config(
    optimizer={"learning_rate": 1e-4, "weight_decay": 0.01, "epsilon": 1e-6},
    schedule={"kind": "linear"},
    training={"passes": 2, "samples_per_update": 4, "tokens_per_row": 64},
    data={"train": "none", "max_tokens": 64, "group": "none"},
)


def both_traces(model):
    order = update_order(SAMPLES, CONFIG)
    passes = [[sample for samples in order.updates_of_pass(number) for sample in samples] for number in range(2)]
    theirs = accelerate_sft(
        model.model, passes, samples_per_update=4, optimizer=CONFIG.optimizer, schedule=CONFIG.schedule
    )
    ours = train_ours(model, order, CONFIG, total_updates=order.num_updates(2), evaluated=SAMPLES[:3])
    return ours, theirs


@pytest.mark.parametrize("attention", ["plain", "tree"])
@pytest.mark.parametrize(("family", "adapter"), [("llama", True), ("qwen3", True), ("qwen3", False)])
def test_nine_micro_batches_in_two_passes_make_six_updates_like_accelerate(family, adapter, attention):
    model = tiny_language_model(family, adapter=adapter, attention=attention)
    ours, theirs = both_traces(model)
    for trace in (ours, theirs):
        assert trace.samples_per_update == (4, 4, 1, 4, 4, 1)
        assert trace.learning_rates == pytest.approx(RATES, rel=1e-4)
        assert trace.scheduler_count == 6
        assert trace.early_changes == 0
    record = compare_traces(ours, theirs)
    assert record.status == "passed", (record.failed_checks, record.figures)
    assert record.framework_paths["accelerate"] == "accelerate.Accelerator.accumulate"


@pytest.mark.parametrize("attention", ["plain", "tree"])
def test_in_float64_the_two_loops_agree_to_rounding(attention, monkeypatch):
    """Six updates whose only difference is the order of summation: nothing hides under float32 noise."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def in_float64(norm, hidden):
        return norm.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))

    monkeypatch.setattr(LlamaRMSNorm, "forward", in_float64)  # the library's rounds to float32
    ours, theirs = both_traces(tiny_language_model("llama", dtype=torch.float64, attention=attention))
    record = compare_traces(
        ours,
        theirs,
        Tolerances(
            loss_nats=1e-12,
            gradient_relative_l2=1e-9,
            weight_change_relative_l2=1e-9,
            weight_change_of_all_relative_l2=1e-9,
            gradient_norm_relative=1e-12,
            learning_rate_relative=1e-12,
        ),
    )
    assert record.status == "passed", (record.failed_checks, record.figures)


def test_a_change_before_the_boundary_is_noticed():
    """The watch itself: a loop that updates after every micro-batch must not look like accumulation."""
    network = tiny_language_model("llama").model
    watch = RunWatch(network)
    watch.inside_update()
    assert watch.early_changes == 0
    with torch.no_grad():
        next(p for p in network.parameters() if p.requires_grad).add_(1e-6)
    watch.inside_update()
    assert watch.early_changes == 1


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UsageError, match="accelerate") as caught:
        accelerate_sft(
            torch.nn.Linear(1, 1), [SAMPLES], samples_per_update=4, optimizer=CONFIG.optimizer, schedule=CONFIG.schedule
        )
    assert "pip install 'traceforge-train[oracle]'" in caught.value.hint
