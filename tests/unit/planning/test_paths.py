"""What each path holds: sizes by hand, the CPU's law against measured peaks, what fits, and how long it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from traceforge.config import LINEAR_MODULES
from traceforge.lean_sizes import key_heads_per_pass
from traceforge.models.layer_parts import LayerShape, plan_row
from traceforge.planning.budget import Budget
from traceforge.planning.generic_path import generic_ledger
from traceforge.planning.lean_path import lean_ledger
from traceforge.planning.model_config import find_shape
from traceforge.planning.plan import fits, ledger_of, longest_row
from traceforge.planning.rates import KNOWN_CARDS, estimate
from traceforge.planning.setup import LARGEST_HEAP_BLOCK, Setup, setup_of
from traceforge.run_files import load_run_file

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "tests" / "data" / "model_configs"
GIB = 2**30


def shape(name: str = "qwen3-8b"):
    return find_shape("not used", given=CONFIGS / f"{name}.json")


def lean(tokens: int = 32768, **changes) -> Setup:
    """Return the QLoRA setup of the GPU figures: Qwen3-8B in NF4, rank 16, bfloat16."""
    plain = Setup(
        device="cuda", value_bytes=2, lean=True, nf4=True, rank=16, targets=LINEAR_MODULES, moments_bytes=8,
        streamed=False, recompute_attention=False, tile_tokens=4096, recompute_layers=False, chunk_tokens=512,
        score_matrix=False, row_tokens=tokens, target_tokens=tokens, single_row=True,
    )  # fmt: skip
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("tokens", "recompute", "gib"),
    [(32768, False, 18.14), (32768, True, 9.0), (86016, False, 47.62)],
)
def test_activations_on_the_host_are_the_measured_ones(tokens, recompute, gib):
    """Measured on a prototype: 18.1 GiB at 32K, 9.0 with attention computed again, 47.6 for a pair of 86,016 tokens."""
    pinned = lean_ledger(shape(), lean(tokens, recompute_attention=recompute)).pinned
    assert (pinned["activations"] + pinned["attention"]) / GIB == pytest.approx(gib, abs=0.01)


def test_streaming_moves_all_layers_but_two_to_the_host():
    resident, streamed = (lean_ledger(shape(), lean(131072, streamed=each)) for each in (False, True))
    layer = 4096 * 47104 // 2 + 4096 * 47104 // 64 + 4 * (4096 * 47104 // 64 // 256)
    by_name = {each.name: each.total for each in resident.moments}
    for each in streamed.moments:
        blocks = {"loading": 36, "forward, attention": 2, "optimizer": 0}.get(each.name, 1)
        assert by_name[each.name] - each.total == pytest.approx((36 - blocks) * layer, rel=1e-6)
    assert streamed.pinned["weights"] - resident.pinned["weights"] == pytest.approx(36 * layer, rel=1e-6)


def test_adam_s_moments_move_to_the_host_and_leave_two_windows_on_the_card():
    here, away = (lean_ledger(shape(), lean(8192, moments_on_host=each)) for each in (False, True))
    trained = shape().adapter_parameters(16, LINEAR_MODULES)
    by_name = {each.name: each.total for each in here.moments}
    for each in away.moments:
        if each.name not in ("loading", "optimizer"):
            assert by_name[each.name] - each.total == 8 * trained
    assert (here.pinned["optimizer"], away.pinned["optimizer"]) == (0, 8 * trained)
    (stepping,) = [each for each in away.moments if each.name == "optimizer"]
    assert stepping.parts["workspace"] == (4 + 16) * 2**23


def test_inputs_of_recomputed_layers_move_to_the_host_but_two():
    kept = {}
    for each in (False, True):
        setup = lean(8192, lean=False, recompute_layers=True, inputs_on_host=each)
        ledger = generic_ledger(shape(), setup)
        (kept[each],) = [moment for moment in ledger.moments if moment.name == "backward, one layer"]
    one = 8192 * 4096 * 2
    assert kept[False].parts["activations"] - kept[True].parts["activations"] == 34 * one
    assert ledger.pinned["activations"] == 36 * one


def test_the_tables_lie_on_the_host_and_the_output_layer_comes_for_the_log_probabilities():
    ledger = lean_ledger(shape(), lean(4096, streamed=True))
    (head,) = [each for each in ledger.moments if each.name == "log-probabilities"]
    assert head.parts["weights"] >= 151936 * 4096 * 2
    assert ledger.pinned["weights"] >= 2 * 151936 * 4096 * 2
    tied = lean_ledger(shape("qwen3-0.6b"), lean(4096))
    assert tied.pinned["weights"] == 151936 * 1024 * 2


def test_memory_grows_with_the_row_and_with_the_tile():
    def size(moment: str, setup: Setup) -> int:
        return next(each.total for each in lean_ledger(shape(), setup).moments if each.name == moment)

    # From 131,072 tokens on attention's backward takes one key head at a time, so that nothing else grows.
    attention = [size("backward, attention", lean(tokens, streamed=True)) for tokens in (131072, 262144, 524288)]
    assert 2 * (attention[1] - attention[0]) == attention[2] - attention[1]
    mlp = {tile: size("backward, MLP", lean(tile_tokens=tile)) for tile in (2048, 4096, 8192)}
    # A tile holds o, a, norm, gate and up, dy, h with the ranks beside them: 53,568 values of 2 bytes.
    assert mlp[8192] - mlp[4096] == 2 * (mlp[4096] - mlp[2048]) == 4096 * 53568 * 2


def test_logits_without_chunks_cost_16_bytes_each():
    chunked, whole = (lean_ledger(shape(), lean(chunk_tokens=chunk)) for chunk in (512, None))
    heads = [next(each for each in ledger.moments if each.name == "log-probabilities") for ledger in (chunked, whole)]
    assert heads[1].parts["logits"] - heads[0].parts["logits"] == pytest.approx(16 * 32768 * 151936, rel=0.01)


MEASURED = [
    # Tokens, changes of the demo's run file, heap limit; peak resident size of the process, glibc 2.36, GiB.
    (512, (), LARGEST_HEAP_BLOCK, 1.597),
    (1024, (), LARGEST_HEAP_BLOCK, 2.167),
    (2880, (), LARGEST_HEAP_BLOCK, 4.40),
    (1024, ("memory.recompute_layers=false",), LARGEST_HEAP_BLOCK, 3.157),
    (1024, ("adapter.rank=64",), LARGEST_HEAP_BLOCK, 2.412),
    (2048, ("adapter.rank=64",), LARGEST_HEAP_BLOCK, 3.735),
    (512, (), 2**18, 1.067),
    (1024, (), 2**18, 1.135),
    (2048, (), 2**18, 1.253),
    (1024, (), 2**20, 1.231),
    (2880, (), 2**20, 1.347),
    (1024, ("adapter.rank=64",), 2**20, 1.423),
    (1024, ("memory.recompute_layers=false",), 2**20, 2.409),
    # The demo itself, two runs of it.
    (2888, (), LARGEST_HEAP_BLOCK, 4.153),
    (2888, (), LARGEST_HEAP_BLOCK, 4.533),
]


@pytest.mark.parametrize(("tokens", "changes", "heap_block", "measured_gib"), MEASURED)
def test_on_the_cpu_the_predicted_peak_is_near_the_measured_one(tokens, changes, heap_block, measured_gib):
    """Within 15% above and 5% below."""
    config = load_run_file(ROOT / "src" / "traceforge" / "demo" / "sft_demo_cpu.toml", changes)
    smollm2 = find_shape("not used", given=CONFIGS / "smollm2-135m.json")
    setup = setup_of(config, smollm2, "cpu", row_tokens=tokens, target_tokens=tokens // 16, heap_block_bytes=heap_block)
    predicted = generic_ledger(smollm2, setup).peak.total / GIB
    assert 0.95 * measured_gib <= predicted <= 1.15 * measured_gib


def test_training_all_parameters_on_the_cpu_takes_what_the_textbook_experiment_took():
    """Measured: 2.8 GiB, rows of 256 tokens; its weights, gradients and moments alone are 16 bytes a parameter."""
    config = load_run_file(ROOT / "examples" / "sft_instruction_cpu.toml")
    smollm2 = find_shape("not used", given=CONFIGS / "smollm2-135m.json")
    peak = generic_ledger(smollm2, setup_of(config, smollm2, "cpu", row_tokens=256)).peak
    assert peak.total / GIB == pytest.approx(2.8, rel=0.15)
    assert peak.parts["weights"] + peak.parts["gradients"] + peak.parts["optimizer"] == 16 * smollm2.parameters()
    assert "adapter" not in peak.parts


def test_what_autograd_keeps_of_a_layer_is_counted_by_hand():
    smollm2 = find_shape("not used", given=CONFIGS / "smollm2-135m.json")
    config = load_run_file(
        ROOT / "src" / "traceforge" / "demo" / "sft_demo_cpu.toml", ["memory.recompute_layers=false"]
    )
    setup = setup_of(config, smollm2, "cpu", row_tokens=1000, heap_block_bytes=0)
    (backward,) = [each for each in generic_ledger(smollm2, setup).moments if each.name == "backward, one layer"]
    attention = 30 * (1000 * (3 * 576 + 2 * 192) * 4 + 4 * 9 * 1000)
    others = 30 * 1000 * (4 * 576 + 4 * 1536 + 7 * 16) * 4
    assert backward.parts["attention"] == attention
    assert backward.parts["activations"] == others


def test_the_longest_row_is_the_last_one_that_fits():
    budget = Budget.of_gib(12, 64)
    longest = longest_row(shape(), lean(), budget)
    for tokens, expected in ((longest, True), (longest + 1, False)):
        setup = lean(tokens)
        assert fits(ledger_of(shape(), setup), setup, budget) is expected
    assert longest_row(shape(), lean(), Budget.of_gib(1, 64)) == 0


@pytest.mark.parametrize(("tokens", "seconds"), [(18489, 2.00), (32768, 4.29), (86016, 19.4)])
def test_the_estimated_time_is_near_the_measured_one(tokens, seconds):
    """Measured on an H200; the last is a preference pair, whose fork spares some attention."""
    found = estimate(shape(), lean(tokens, target_tokens=min(tokens, 32768)), KNOWN_CARDS["H200"])
    assert found.seconds == pytest.approx(seconds, rel=0.12)
    assert found.energy_j is None
    assert estimate(shape(), lean(tokens), replace(KNOWN_CARDS["H200"], power_w=600.0)).energy_j > 600 * seconds / 2


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1024, 8), (18489, 8), (32768, 4), (65536, 2), (131072, 1), (10**6, 1)]
)
def test_the_plan_and_the_layers_take_the_same_heads_at_a_time(tokens, expected):
    """32 query heads on 8 key heads: 4 query heads a key head, passes of 2^19 query heads x tokens."""
    assert key_heads_per_pass(32, 8, tokens) == expected
    layers = LayerShape(hidden=8, heads=32, key_heads=8, head_size=4, mlp=8, scale=0.5)
    angles = (torch.empty(tokens, 0), torch.empty(tokens, 0))
    passes = plan_row(layers, (), angles, tile_tokens=4096, recompute=False).passes
    assert {each.stop - each.start for each in passes} == {expected}
