"""docs/performance.md is what the saved results say, and its verdicts follow from them."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("gpu_table")
    for name in ("gpu_table", "gpu_ceilings", "gpu_shapes"):
        sys.modules.pop(name, None)


def saved(gpu_table):
    return [json.loads(path.read_text()) for path in sorted(gpu_table.RESULTS.glob("gpu-lean*.json"))]


def test_the_page_is_what_the_results_say(gpu_table):
    calls = sorted(saved(gpu_table), key=lambda call: call["date"], reverse=True)
    assert gpu_table.PAGE.read_text() == gpu_table.page(calls), "run `python benchmarks/gpu_table.py`"


def call_of(*results):
    common = {"shape": "qwen3-8b", "quantization": "nf4", "process": "p"}
    return {"call": "made up", "results": [{**common, **each} for each in results]}


def test_a_verdict_needs_speed_and_memory_and_a_peer_of_the_same_call(gpu_table):
    answer = next(each.answer for each in gpu_table.DEMANDS if each.work == "SFT 32,768, resident")
    ours = {"name": "sft", "who": "traceforge", "s": 4.0, "peak_allocated_gib": 5.9}
    theirs = {"name": "sft", "who": "unsloth", "s": 4.0 * 1.18}
    assert answer(call_of(ours, theirs)) == ("4.00 s, 5.90 GiB; Unsloth 4.72 s: 1.18x", True)
    assert answer(call_of({**ours, "peak_allocated_gib": 6.01}, theirs))[1] is False
    assert answer(call_of({**ours, "s": 4.1}, theirs))[1] is False
    assert answer(call_of(ours)) == ("4.00 s, 5.90 GiB, no peer in this call", False)
    assert answer(call_of(theirs)) is None
    assert answer(call_of({**ours, "shape": "qwen3-0.6b"}, theirs)) is None


def test_a_ceiling_is_work_over_rates(gpu_table):
    """One layer of one head, by hand: 2 tokens, hidden 2, MLP 3, head size 2, vocabulary 5."""
    shape = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    shape |= {"hidden_size": 2, "intermediate_size": 3, "head_dim": 2, "vocab_size": 5}
    linear = 2 * (2 + 2 * 2) + 2 * 2 + 3 * 2 * 3  # q, k, v; o; gate, up, down
    rates = {"matmul": 1e-12, "attention_forward": 1e30, "attention_backward": 1e30}
    wanted = 2 * 2 * (3 * linear - 6) + 4 * 1 * 2 * 5
    assert gpu_table.ceiling_s(shape, rates, 2, 1) == pytest.approx(wanted)
    rates = {"matmul": 1e30, "attention_forward": 1e-12, "attention_backward": 1e-12}
    assert gpu_table.ceiling_s(shape, rates, 2, 1) == pytest.approx(2 * 4 * 2 * 3.5)
    assert gpu_table.ceiling_s(shape, rates, 2, 1, recompute=True) == pytest.approx(2 * 4 * 2 * 4.5)


def test_a_changed_result_changes_the_page(gpu_table):
    calls = saved(gpu_table)
    changed = copy.deepcopy(calls)
    timed = next(each for each in changed[0]["results"] if "s" in each)
    timed["s"] *= 2
    assert gpu_table.page(changed) != gpu_table.page(calls)
