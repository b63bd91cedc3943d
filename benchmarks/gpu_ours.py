"""One process of `gpu.py`: our own updates on one card. Reads jobs as JSON on stdin, prints one `RESULT` line each.

    python benchmarks/gpu_ours.py CHECKPOINT PLACEMENT < jobs.json

A job is {"name", "work": {"sft": T} | {"pair": [P, R]} | {"turns": [n, T]} | {"apart": [n, T]}, "cap_gib", "repeats",
"warmups", "recompute", "tile", "path", "profile", "copies"}. An update is what training makes: plan, forward, backward,
clip, AdamW (its moments on the host where the weights are streamed). A cap holds for the updates, not for loading.
`apart` runs the samples of `turns` one by one.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_profile import profile_update
from gpu_shapes import preference_pair, sft_sample, trajectory
from traceforge.config import AdapterSettings, MemorySettings, ModelSettings, OptimizerSettings, SimpoObjective
from traceforge.memory.offload import Lanes
from traceforge.models.adapters import add_adapter
from traceforge.models.language_model import LanguageModel, choose_layout, choose_path
from traceforge.models.load import ModelLocation, load_base
from traceforge.training.methods import Sft, Simpo
from traceforge.training.optimizer import build_optimizer
from traceforge.training.update import apply_update, backward, plan_update

GIB = 2**30


def load(folder: Path, placement: str, path: str) -> LanguageModel:
    """Return the model of a checkpoint as training loads it, with a fresh adapter of rank 16."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    quantized = "quantization_config" in json.loads((folder / "config.json").read_text())
    settings = ModelSettings(name_or_path=str(folder), quantization="nf4" if quantized else "none")
    adapter = AdapterSettings(rank=16, alpha=16)
    base = load_base(ModelLocation(str(folder), folder, None, None, "local_folder"), settings, adapter, str(device))
    network = add_adapter(base, adapter, seed=0).to(device)
    network.train()
    model = LanguageModel(network, device, torch.bfloat16, logits_chunk_tokens=512)
    choose_layout(model, "tree")
    if path == "generic":
        from traceforge.memory.recompute import recompute_layers

        recompute_layers(model.base.base_model.layers)
    choose_path(model, MemorySettings(path=path, placement=placement))
    return model


def items_of(work: dict[str, Any], vocabulary: int, seed: int) -> tuple[list[Any], Any]:
    """Return what one update trains, and the method."""
    if "sft" in work:
        return [sft_sample(work["sft"], vocabulary, seed)], Sft()
    if "pair" in work:
        return [preference_pair(*work["pair"], vocabulary, seed)], Simpo(SimpoObjective(method="simpo"))
    turns, total = work.get("turns") or work["apart"]
    return trajectory(turns, total, vocabulary, 0), Sft()


_COPY = Lanes._copy


def throttle(copies: int) -> None:
    """Make each copy between host and device `copies` times: a slower bus."""

    def repeated(self: Lanes, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        for _ in range(copies - 1):
            target.copy_(source, non_blocking=True)
        return _COPY(self, stream, target, source)

    Lanes._copy = repeated if copies > 1 else _COPY


def measure(model: LanguageModel, optimizer: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return time, memory and loss of a job's updates."""
    work = job["work"]
    lean = model.lean
    if lean is not None:
        lean.options = replace(
            lean.options,
            recompute_attention=job.get("recompute", False),
            tile_tokens=job.get("tile", 4096),
        )
        lean.layers.store.forget()
        throttle(job.get("copies", 1))
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, job["cap_gib"] * GIB / total) if job.get("cap_gib") else 1.0)
    vocabulary = model.base.config.vocab_size
    seconds: list[float] = []
    allocated: list[int] = []
    losses: list[float] = []

    def update(seed: int) -> None:
        items, method = items_of(work, vocabulary, seed)
        rows_limit = max(item.num_tokens for item in items) if "apart" in work else 10**9
        parts = [[item] for item in items] if "apart" in work else [items]
        torch.cuda.synchronize()
        started = time.perf_counter()
        for part in parts[:-1]:
            backward(model, plan_update(model, part, tokens_per_row=rows_limit, method=method))
        planned = plan_update(model, parts[-1], tokens_per_row=rows_limit, method=method)
        losses.append(apply_update(model, planned, optimizer, max_gradient_norm=1.0).loss)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        allocated.append(torch.cuda.memory_allocated())

    for seed in range(job.get("warmups", 1)):
        update(seed)
    first_s = seconds[0] if seconds else None
    seconds.clear()
    torch.cuda.reset_peak_memory_stats()
    for seed in range(job.get("repeats", 2)):
        update(100 + seed)
    items, method = items_of(work, vocabulary, 0)
    rows = plan_update(model, items, tokens_per_row=10**9, method=method).rows
    found: dict[str, Any] = {
        **job,
        "who": "traceforge",
        "s": statistics.median(seconds),
        "all_s": seconds,
        "first_s": first_s,
        "tokens": sum(row.num_tokens for row in rows),
        "tokens_apart": sum(sample.num_tokens for item in items for sample in item.samples),
        "tok_per_s": sum(row.num_tokens for row in rows) / statistics.median(seconds),
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "allocated_after_updates_gib": [each / GIB for each in allocated],
        "host_pinned_gib": lean.host_bytes() / GIB if lean is not None else 0.0,
        "path": model.effective_path(),
        "attention": model.effective_attention(),
        "loss": losses[-1],
    }
    if job.get("profile"):
        found["profile"] = profile_update(lambda: update(200), statistics.median(seconds))
    return found


def main() -> None:
    """Measure every job of stdin in one process."""
    folder, placement = Path(sys.argv[1]), sys.argv[2]
    jobs = json.load(sys.stdin)
    started = time.perf_counter()
    model = load(folder, placement, jobs[0].get("path", "lean"))
    moments = OptimizerSettings(learning_rate=1e-5, offload_state=placement == "streamed")
    optimizer = build_optimizer(model.trainable(), moments)
    print(f"loaded in {time.perf_counter() - started:.1f} s: {model.effective_path()}; {model.path_reason}", flush=True)
    for job in jobs:
        job["placement"] = placement
        try:
            found = measure(model, optimizer, job)
        except torch.OutOfMemoryError as error:
            found = {**job, "who": "traceforge", "out_of_memory": str(error).splitlines()[0]}
            optimizer.zero_grad(set_to_none=True)
        print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
