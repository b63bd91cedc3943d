"""A run's plan: its longest row, refusal on a card by name, and planned memory in the evidence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from traceforge.errors import DoesNotFitError
from traceforge.parallel.world import Device
from traceforge.run_files import load_run_file
from traceforge.samples.branches import PairRow
from traceforge.samples.prefix_tree import build_rows
from traceforge.samples.tokens import Sample
from traceforge.training.fitting import longest_of, longest_planned_row, plan_of, planned_memory, require_fit

ROOT = Path(__file__).parents[3]
GIB = 2**30


def sample(name: str, ids: list[int], trained: int) -> Sample:
    """Return a sample whose last `trained` tokens are trained."""
    weights = np.zeros(len(ids))
    weights[len(ids) - trained :] = 1.0
    return Sample(f"{name}#0", name, name, np.array(ids, dtype=np.int64), weights)


TRUNK = list(range(100, 160))
TURNS = [sample("a", [*TRUNK, 1, 2, 3], 3), sample("b", [*TRUNK, 4, 5], 2)]


@pytest.mark.parametrize(
    ("attention", "tokens_per_row", "longest"),
    [("auto", 200, (65, 5)), ("auto", 64, (64, 5)), ("packed", 200, (125, 5)), ("plain", 200, (63, 5))],
)
def test_the_longest_row_of_an_update_is_its_tree_or_a_full_row(attention, tokens_per_row, longest):
    updates = [[SimpleNamespace(samples=(each,)) for each in TURNS], [SimpleNamespace(samples=(TURNS[1],))]]
    assert longest_planned_row(updates, tokens_per_row=tokens_per_row, attention=attention) == longest
    if attention == "auto":
        rows = build_rows(TURNS, tokens_per_row=tokens_per_row)
        assert max(row.num_tokens for row in rows) <= longest[0]


def test_the_longest_row_that_ran_is_found_among_rows_of_samples_and_of_pairs():
    rows = build_rows(TURNS, tokens_per_row=200)
    assert longest_of(rows) == (65, 5)
    assert longest_of([PairRow(rows[0], (), (), ())]) == (65, 5)
    assert longest_of([]) == (0, 0)


def world(kind: str, gib: float):
    return SimpleNamespace(rank=0, devices=(Device(kind, "uuid", "card", int(gib * GIB), "8.6"),))


@pytest.fixture
def folder(tmp_path):
    """A model folder with nothing but the shape of Qwen3-8B."""
    (tmp_path / "config.json").write_text((ROOT / "tests" / "data" / "model_configs" / "qwen3-8b.json").read_text())
    return str(tmp_path)


@pytest.fixture
def much_host_memory(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=256 * GIB))


def test_a_card_that_is_too_small_is_refused_with_settings_that_fit(folder, much_host_memory):
    changes = ["memory.path=generic", "memory.recompute_layers=true"]
    config = load_run_file(ROOT / "examples" / "sft_qlora_32k_1gpu.toml", changes)
    plan, why_not = plan_of(config, world("cuda", 24), folder, (65536, 8000))
    assert why_not is None
    with pytest.raises(DoesNotFitError) as refused:
        require_fit(plan, config)
    assert refused.value.exit_code == 3
    assert "a row of 65,536 tokens does not fit a card of 24 GiB" in refused.value.message
    assert "--set memory.path=lean" in refused.value.hint
    assert "memory.over_plan=warn" in refused.value.hint


def test_the_refusal_can_be_overridden_by_name_and_is_noted_then(folder, much_host_memory):
    changes = ["memory.path=generic", "memory.recompute_layers=true", "memory.over_plan=warn"]
    config = load_run_file(ROOT / "examples" / "sft_qlora_32k_1gpu.toml", changes)
    plan, _ = plan_of(config, world("cuda", 24), folder, (65536, 8000))
    assert "does not fit a card of 24 GiB" in require_fit(plan, config)


def test_a_row_that_fits_is_not_refused_however_long_the_settings_would_allow(folder, much_host_memory):
    changes = ["memory.path=generic", "memory.recompute_layers=true"]
    config = load_run_file(ROOT / "examples" / "sft_qlora_32k_1gpu.toml", changes)
    plan, _ = plan_of(config, world("cuda", 24), folder, (12000, 2000))
    assert require_fit(plan, config) is None


def test_too_little_host_memory_for_pinned_activations_is_refused_on_a_card(folder, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=16 * GIB))
    config = load_run_file(ROOT / "examples" / "sft_qlora_32k_1gpu.toml")
    plan, _ = plan_of(config, world("cuda", 80), folder, (65536, 8000))
    with pytest.raises(DoesNotFitError, match="16 GiB of host memory"):
        require_fit(plan, config)


def test_on_the_cpu_a_plan_that_does_not_fit_is_noted_and_tried(folder, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=GIB))
    config = load_run_file(ROOT / "src" / "traceforge" / "demo" / "sft_demo_cpu.toml")
    plan, _ = plan_of(config, world("cpu", 0), folder, (4096, 400))
    assert "does not fit 1 GiB of host memory" in require_fit(plan, config)


def test_a_model_that_cannot_be_planned_is_said_to_be_and_is_not_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    config = load_run_file(ROOT / "examples" / "sft_qlora_32k_1gpu.toml")
    plan, why_not = plan_of(config, world("cuda", 24), str(tmp_path), (4096, 400))
    assert plan is None
    assert "mixtral" in why_not


def test_the_evidence_keeps_the_plan_by_part(folder, much_host_memory):
    config = load_run_file(ROOT / "examples" / "sft_qlora_32k_1gpu.toml")
    plan, _ = plan_of(config, world("cuda", 24), folder, (32768, 8000))
    kept = planned_memory(plan)
    assert (kept.path, kept.row_tokens, kept.trained_row_tokens, kept.fits) == ("lean", 32768, 8000, True)
    assert sum(kept.parts_bytes.values()) == kept.device_bytes
    assert kept.host_bytes > 18 * GIB
