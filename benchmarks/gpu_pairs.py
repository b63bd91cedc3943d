"""Preference pairs on a GPU: exactness first, then time and memory, on one card. One call, one JSON.

    python benchmarks/gpu_pairs.py --out DIR

1. Exactness in bfloat16 on a tiny model, SimPO, an ending of several turns among the pairs: shared prefix in one
   process, and branch-parallel on two ranks that share the card (gloo). Loss and gradient may be no further from a
   float32 reference of plain branches than 1.1 times what plain branches in bfloat16 are, and after three updates the
   weights of both ranks are the same bits.
2. The same in float32: loss 1e-5 relative, gradient 1e-4 relative L2. (cuDNN and flash run in bfloat16 only, so this
   covers rows, scores and exchanges, not those kernels.)
3. Time and peak memory of one update on the shape of a 0.6B model (random weights): a pair as one tree, its branches
   one after the other.

The ranks are processes of this file, started by torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_trees import SHAPE_06B, language_model
from traceforge.config import OptimizerSettings, SimpoObjective
from traceforge.memory.recompute import recompute_layers
from traceforge.parallel.meeting import meet
from traceforge.parallel.world import ONE_PROCESS, World
from traceforge.samples.branches import Pair
from traceforge.samples.tokens import Sample
from traceforge.training.methods import Simpo
from traceforge.training.optimizer import build_optimizer
from traceforge.training.update import apply_update, plan_update

TINY = dict(SHAPE_06B, vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, head_dim=64)  # fmt: skip
SETTINGS = SimpoObjective(method="simpo", beta=2.0, gamma_beta_ratio=0.25)
NUM_UPDATES = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sample(name: str, ids: np.ndarray, trained_from: int) -> Sample:
    """Return a sample that is trained from a position on."""
    weights_S = np.zeros(ids.size)
    weights_S[trained_from:] = 1.0
    return Sample(name, name, "t", ids, weights_S)


def pairs(vocabulary: int, prompt: int, reply: int, *, seed: int = 0) -> list[Pair]:
    """Return a pair of one turn a side, and one whose chosen side has a second turn that forks from the history."""
    generator = np.random.default_rng(seed)

    def some(length: int) -> np.ndarray:
        return generator.integers(0, vocabulary, length)

    start, first, second, seen, other = some(prompt), some(reply), some(reply), some(reply // 2), some(reply)
    forked = np.concatenate([start, first[reply // 3 :], seen, second])  # a template that drops old reasoning
    join = np.concatenate
    return [
        Pair("one turn", "g", "t", (sample("c", join([start, second]), prompt),),
             (sample("r", join([start, other]), prompt),)),
        Pair("two turns", "g", "t",
             (sample("c1", join([start, first]), prompt), sample("c2", forked, forked.size - reply)),
             (sample("r", join([start, other[::-1].copy()]), prompt),)),
    ]  # fmt: skip


def three_updates(world: World, dtype: str, layout: str) -> dict[str, Any]:
    """Return losses, the gradient of the first update before clipping, and the weights after the last."""
    device = torch.device("cuda", 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = language_model(device, TINY, DTYPES[dtype], layout)
    method = Simpo(SETTINGS, world)
    optimizer = build_optimizer(model.trainable(), OptimizerSettings(learning_rate=1e-3))
    gradients: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({name: p.grad.double().cpu() for name, p in model.trainable()})
    )
    losses = []
    for seed in range(NUM_UPDATES):
        items = pairs(TINY["vocab_size"], 1500, 200, seed=seed)
        planned = plan_update(model, items, tokens_per_row=8000, method=method, world=world)
        losses.append(apply_update(model, planned, optimizer, max_gradient_norm=None, world=world).loss)
    weights = {name: p.detach().double().cpu() for name, p in model.trainable()}
    return {"losses": losses, "gradient": gradients[0], "weights": weights, "kernels": model.effective_attention()}


def on_two_ranks(dtype: str, folder: Path) -> list[dict[str, Any]]:
    """Return what `three_updates` found on each of two ranks that hold one branch each and share the card."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "127.0.0.1:0", __file__, "--rank-of", dtype, "--out", str(folder)]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "4"})
    return [torch.load(folder / f"{dtype}-rank{rank}") for rank in range(2)]


def run_rank(dtype: str, folder: Path) -> None:
    """Make the updates as one rank of two."""
    world = meet(os.environ, backend="gloo", branch_parallel=True, shared_device=True)
    world.start()
    found = three_updates(world, dtype, "tree")
    torch.save(found, folder / f"{dtype}-rank{world.rank}")
    world.close()


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Return the relative errors of the losses and of the gradient."""
    square = sum(float(each.norm() ** 2) for each in wanted["gradient"].values())
    off = sum(float((found["gradient"][name] - each).norm() ** 2) for name, each in wanted["gradient"].items())
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(found["losses"], wanted["losses"], strict=True)),
        "gradient": (off / square) ** 0.5,
    }


def check_exactness(folder: Path) -> dict[str, Any]:
    """Return the errors of each way to compute the updates; fail where one is too large."""
    reference = three_updates(ONE_PROCESS, "float32", "plain")
    found: dict[str, Any] = {"reference": "plain branches in float32", "updates": NUM_UPDATES}
    for dtype in DTYPES:
        ranks = on_two_ranks(dtype, folder)
        ways = {
            "plain branches": three_updates(ONE_PROCESS, dtype, "plain"),
            "shared prefix": three_updates(ONE_PROCESS, dtype, "tree"),
            "branch-parallel, two ranks on one card": ranks[0],
        }
        errors = {name: compare(way, reference) for name, way in ways.items()}
        same = all(torch.equal(each, ranks[1]["weights"][name]) for name, each in ranks[0]["weights"].items())
        found[dtype] = {**errors, "weights of both ranks are the same bits": same,
                        "kernels": {name: way["kernels"] for name, way in ways.items()}}  # fmt: skip
        print(dtype, json.dumps(found[dtype]), flush=True)
        assert same, "the ranks hold different weights"
        for name, error in errors.items():
            if dtype == "float32":
                assert error["loss"] < 1e-5, (name, error)
                assert error["gradient"] < 1e-4, (name, error)
            else:
                assert error["gradient"] <= 1.1 * errors["plain branches"]["gradient"], (name, errors)
    return found


def measure(prompt: int, reply: int, repeats: int = 5) -> dict[str, Any]:
    """Return time and peak memory of an update of one pair, as a tree and branch by branch, on the 0.6B shape."""
    device = torch.device("cuda", 0)
    (pair, _) = pairs(SHAPE_06B["vocab_size"], prompt, reply)
    method = Simpo(SETTINGS)
    found: dict[str, Any] = {"prompt_tokens": prompt, "reply_tokens": reply, "layers_recomputed": True}
    for name, layout in (("shared_prefix", "tree"), ("branch_by_branch", "plain")):
        model = language_model(device, SHAPE_06B, torch.bfloat16, layout)
        recompute_layers(model.base.base_model.layers)
        optimizer = build_optimizer(model.trainable(), OptimizerSettings())
        seconds, losses = [], []
        for number in range(repeats + 1):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            planned = plan_update(model, [pair], tokens_per_row=2 * (prompt + reply), method=method)
            losses.append(apply_update(model, planned, optimizer, max_gradient_norm=1.0).loss)
            torch.cuda.synchronize()
            if number:
                seconds.append(time.perf_counter() - started)
        found[name] = {
            "seconds": seconds,
            "median_s": statistics.median(seconds),
            "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "first_loss": losses[0],
            "rows": len(planned.rows),
            "kernels": model.effective_attention(),
        }
        del model, optimizer
        torch.cuda.empty_cache()
    tree, plain = found["shared_prefix"], found["branch_by_branch"]
    found["tree_is_faster_by"] = plain["median_s"] / tree["median_s"]
    found["loss_difference_relative"] = abs(tree["first_loss"] - plain["first_loss"]) / abs(plain["first_loss"])
    return found


def main() -> None:
    """Run everything and write gpu-pairs.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rank-of", choices=DTYPES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    assert torch.cuda.is_available(), "this benchmark needs a CUDA device"
    if arguments.rank_of:
        run_rank(arguments.rank_of, arguments.out)
        return
    import transformers

    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "objective": SETTINGS.model_dump(),
    }
    with tempfile.TemporaryDirectory() as folder:
        result["exactness"] = check_exactness(Path(folder))
    result["pairs_on_0.6b"] = []
    for prompt, reply in ((15_360, 512), (30_720, 1024)):
        measured = measure(prompt, reply)
        print(json.dumps(measured), flush=True)
        result["pairs_on_0.6b"].append(measured)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu-pairs.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
