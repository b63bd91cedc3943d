"""The planner's ledger of the lean path against bytes counted on a CPU: moment by moment, without a card.

    python benchmarks/plan_allocations.py [--tokens 2048 8192]

Counts   torch's profiler sees every allocation; marks around the lean layers' methods say which moment it belongs to.
         What lay there before the update (weights, adapter, moments) counts on neither side; the host's slab is
         reserved by an update before. Tiles are small, so that temporaries of torch's fallbacks in them are, too.
Must     MLP and projection within 5%: they are the same buffers on every device. Attention and forward pass are shown
         only: torch's fallbacks for the Triton kernels make temporaries of their own, and the card's kernels others.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from transformers import Qwen3Config, Qwen3ForCausalLM

from traceforge.config import LINEAR_MODULES, AdapterSettings, MemorySettings
from traceforge.models.adapters import add_adapter
from traceforge.models.language_model import LanguageModel, choose_layout, choose_path
from traceforge.planning.lean_path import lean_ledger
from traceforge.planning.setup import Setup
from traceforge.samples.model_shape import shape_of
from traceforge.samples.tokens import Sample
from traceforge.training.update import backward, plan_update

MOST_OFF = 0.05
TILE, CHUNK, RANK, TRAINED = 16, 64, 4, 65
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": False,
}
MOMENTS = {
    "forward": "forward, attention",
    "_through_mlp": "backward, MLP",
    "_through_attention": "backward, attention",
    "_through_projection": "backward, projection",
}


def mark_moments() -> None:
    """Put a mark around each method of the lean layers that is a moment of the ledger."""
    from traceforge.models.layers import LeanLayers

    for name, moment in MOMENTS.items():
        method = getattr(LeanLayers, name)

        @functools.wraps(method)
        def marked(*arguments: Any, _method: Any = method, _moment: str = moment, **keywords: Any) -> Any:
            with torch.profiler.record_function(_moment):
                return _method(*arguments, **keywords)

        setattr(LeanLayers, name, marked)


def model_of() -> LanguageModel:
    """Return a small model with an adapter on the lean path, in float32."""
    torch.manual_seed(0)
    network = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).requires_grad_(False).eval()
    network = add_adapter(network, AdapterSettings(rank=RANK), seed=0)
    model = LanguageModel(network, torch.device("cpu"), torch.float32, logits_chunk_tokens=CHUNK)
    choose_layout(model, "tree")
    choose_path(model, MemorySettings(path="lean", tile_tokens=TILE))
    return model


def sample(tokens: int, seed: int) -> Sample:
    """Return one sample of random tokens whose end is trained."""
    weights = np.zeros(tokens)
    weights[-TRAINED:] = 1.0
    ids = np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], tokens)
    return Sample(f"s#{seed}", "s", "s", ids, weights)


def counted(model: LanguageModel, tokens: int) -> dict[str, int]:
    """Return the most bytes that were allocated at once in each marked moment of one update."""
    for seed in (0, 1):
        update = plan_update(model, [sample(tokens, seed)], tokens_per_row=tokens)
        if seed == 0:
            backward(model, update)
        for _, parameter in model.trainable():
            parameter.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        backward(model, update)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((each["ts"], each["args"]) for each in events if each.get("name") == "[memory]")
    before = memory[0][1]["Total Allocated"] - memory[0][1]["Bytes"]
    most = dict.fromkeys(MOMENTS.values(), 0)
    for mark in events:
        if mark.get("name") in most and "dur" in mark:
            start, stop = mark["ts"], mark["ts"] + mark["dur"]
            inside = [args["Total Allocated"] - before for ts, args in memory if start <= ts <= stop]
            most[mark["name"]] = max([most[mark["name"]], *inside])
    return most


def planned(tokens: int) -> dict[str, int]:
    """Return what the ledger says of the same update, without what lies there anyway."""
    shape = shape_of({**SHAPE, "model_type": "qwen3"})
    assert shape is not None
    setup = Setup(
        device="cuda", value_bytes=4, lean=True, nf4=False, rank=RANK, targets=LINEAR_MODULES, moments_bytes=8,
        streamed=False, recompute_attention=False, tile_tokens=TILE, recompute_layers=False, chunk_tokens=CHUNK,
        score_matrix=False, row_tokens=tokens, target_tokens=TRAINED, single_row=True,
    )  # fmt: skip
    anyway = ("weights", "adapter", "optimizer")
    return {
        each.name: each.total - sum(each.parts.get(part, 0) for part in anyway)
        for each in lean_ledger(shape, setup, rectangles=False).moments
    }


def main() -> None:
    """Compare both and fail where they must agree and do not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    options = parser.parse_args()
    mark_moments()
    model = model_of()
    wrong = []
    for tokens in options.tokens:
        found, said = counted(model, tokens), planned(tokens)
        for moment, size in found.items():
            off = said[moment] / size - 1
            print(f"{tokens:>6} tokens  {moment:<22} planned {said[moment] / 2**20:8.2f} MiB, counted "
                  f"{size / 2**20:8.2f} ({off:+.1%})")  # fmt: skip
            if moment in {"backward, MLP", "backward, projection"} and abs(off) > MOST_OFF:
                wrong.append(moment)
    if wrong:
        sys.exit(f"the ledger is off: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
