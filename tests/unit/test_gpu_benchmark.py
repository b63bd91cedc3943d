"""The GPU benchmark's own parts on the CPU: its checkpoints, its work, its plan."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from traceforge.config import AdapterSettings, MemorySettings, ModelSettings
from traceforge.models.adapters import add_adapter
from traceforge.models.language_model import LanguageModel, choose_layout, choose_path
from traceforge.models.load import ModelLocation, linears_4bit, load_base
from traceforge.training.update import backward, plan_update

ROOT = Path(__file__).parents[2]
MODULES = ("gpu", "gpu_shapes", "gpu_ours", "gpu_profile")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_its_checkpoints_load_and_train_on_the_lean_path(benchmark, tmp_path, quantization):
    """The NF4 one is pre-quantised, as `*-bnb-4bit` checkpoints are."""
    import torch

    folder = tmp_path / "checkpoint"
    benchmark["gpu_shapes"].write_checkpoint("tiny", quantization, folder, "cpu")
    settings, adapter = ModelSettings(name_or_path=str(folder), quantization=quantization), AdapterSettings()
    base = load_base(ModelLocation(str(folder), folder, None, None, "local_folder"), settings, adapter, "cpu")
    assert len(linears_4bit(base)) == (14 if quantization == "nf4" else 0)
    network = add_adapter(base, adapter, seed=0)
    model = LanguageModel(network, torch.device("cpu"), torch.bfloat16, logits_chunk_tokens=64)
    choose_layout(model, "tree")
    choose_path(model, MemorySettings(path="lean", placement="streamed", tile_tokens=64))
    assert model.lean is not None
    assert (model.lean.quantized_bytes > 0) == (quantization == "nf4")
    for work in ({"sft": 90}, {"pair": [60, 20]}, {"turns": [3, 2300]}):
        items, method = benchmark["gpu_ours"].items_of(work, 512, 0)
        backward(model, plan_update(model, items, tokens_per_row=10**6, method=method))
        norms = [float(p.grad.norm()) for name, p in model.trainable() if "lora_B" in name]
        assert min(norms) > 0
        model.model.zero_grad(set_to_none=True)


def test_its_plan_names_scripts_and_jobs_that_exist(benchmark):
    planned = benchmark["gpu"].processes(full=True)
    names = [process.name for process in planned]
    assert len(set(names)) == len(names)
    for process in planned:
        assert (ROOT / "benchmarks" / process.script[0]).is_file()
        assert process.checkpoint[0] in benchmark["gpu_shapes"].SHAPES
    (only,) = benchmark["gpu"].chosen(planned, ["ours, streamed"], ["pair"])
    assert [job["name"] for job in only.jobs] == ["pair"]
    assert benchmark["gpu"].chosen(planned, None, None) == planned
    ordered = benchmark["gpu"].chosen(planned, ["unsloth", "ceilings"], ["branch"])
    assert [process.name for process in ordered] == ["unsloth", "ceilings"]


def test_busy_time_is_the_union_of_kernels(benchmark):
    assert benchmark["gpu_profile"]._union([(5, 6), (0, 2), (1, 3), (2.5, 2.75)]) == 4
