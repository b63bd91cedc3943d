"""Preference pairs on the CPU: a pair as one prefix tree, against TRL's CPOTrainer.

    python benchmarks/pairs.py [--repeats 3] [--prompt-tokens 1536] [--reply-tokens 128] [--json FILE]

Work     SimPO on SmolLM2-135M-Instruct (`make model`), LoRA of rank 16 on the seven linears with random B, float32, one
         pair an update: a prompt of 1,536 tokens of a recorded run and two endings of 128.
Rival    CPOTrainer with `loss_type="simpo"`: it runs prompt and ending of both sides as a batch of two and makes logits
         of every position; its defaults of bf16, checkpointing and re-tokenising are overridden. Each contender is a
         process of its own (`pair_contenders.py`, which says what is timed and measured), and they take turns. It needs
         about 12 GiB of free memory, most of it for CPOTrainer.
Must     Loss (1e-5) and gradient of the first update (1e-3) agree; the tree is at least 1.7 times as fast as CPOTrainer
         and needs at least 1.6 times less memory above the loaded model. Medians of the timed updates count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import traceforge
from pair_contenders import CONTENDERS, PairWork
from traceforge.config import RunConfig
from traceforge.demo.model import MODEL_FOLDER, prepare_model
from traceforge.run_files import parse_run
from traceforge.samples.branches import Pair
from traceforge.samples.tokenizer import load_tokenizer
from traceforge.samples.tokens import IntArray, Sample
from turns import take_turns

_HERE = Path(__file__).resolve().parent
_LOG = _HERE.parent / "src/traceforge/demo/data/logs/django__django-10973.traj.json"
_RESULT = _HERE / "results" / "pairs-cpu.json"

LEAST_SPEEDUP = 1.7
LEAST_MEMORY_SAVING = 1.6
LOSS_RELATIVE = 1e-5
GRADIENT_RELATIVE_L2 = 1e-3
RANK = 16


def main() -> None:
    """Measure, print, save, and fail if a demand is not met."""
    options = _options()
    model = prepare_model(_HERE.parent / MODEL_FOLDER)
    config = _config(model, options.prompt_tokens + options.reply_tokens)
    pairs = real_pairs(model, options.repeats + 1, options.prompt_tokens, options.reply_tokens)
    with tempfile.TemporaryDirectory(prefix="traceforge-pairs-") as folder:
        load = [os.getloadavg()[0]]
        work = PairWork(config, tuple((pair,) for pair in pairs), Path(folder))
        told = take_turns(_HERE / "pair_contenders.py", CONTENDERS, work, num_updates=len(pairs))
        load.append(os.getloadavg()[0])
        gradients = {name: torch.load(Path(folder) / f"{name}.gradient") for name in CONTENDERS}
    sides = {name: _summary(updates[1:]) for name, updates in told.items()}
    ours, missed = sides["shared_prefix"], []
    for name, side in sides.items():
        side["loss_difference_relative"] = _loss_difference(told["shared_prefix"], told[name])
        side["gradient_difference_relative_l2"] = _gradient_difference(gradients["shared_prefix"], gradients[name])
        side["tree_is_faster_by"] = side["median_s"] / ours["median_s"]
        side["tree_is_faster_by_in_cpu_time"] = side["median_cpu_s"] / ours["median_cpu_s"]
        side["tree_needs_less_memory_by"] = side["peak_growth_mib"] / ours["peak_growth_mib"]
        _print_side(name, side)
        if not side["loss_difference_relative"] <= LOSS_RELATIVE:
            missed.append(f"the losses of {name} and the tree differ by {side['loss_difference_relative']:.1e}")
        if not side["gradient_difference_relative_l2"] <= GRADIENT_RELATIVE_L2:
            missed.append(
                f"the gradients of {name} and the tree differ by {side['gradient_difference_relative_l2']:.1e}"
            )
    speedup, saving = sides["cpo"]["tree_is_faster_by"], sides["cpo"]["tree_needs_less_memory_by"]
    if speedup < LEAST_SPEEDUP:
        missed.append(f"{speedup:.2f}x as fast as CPOTrainer, {LEAST_SPEEDUP:g}x is demanded")
    if saving < LEAST_MEMORY_SAVING:
        missed.append(f"{saving:.2f}x less memory than CPOTrainer, {LEAST_MEMORY_SAVING:g}x is demanded")
    record = {
        **_about(options),
        "load_average": load,
        "model": {"id": model.name, "lora_rank": RANK, "dtype": "float32"},
        "objective": config.objective.model_dump(),
        "contenders": sides,
        "demands": {
            "faster_by": LEAST_SPEEDUP,
            "less_memory_by": LEAST_MEMORY_SAVING,
            "loss_relative": LOSS_RELATIVE,
            "gradient_relative_l2": GRADIENT_RELATIVE_L2,
        },
        "not_reached": missed,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if missed:
        sys.exit("not reached:\n  " + "\n  ".join(missed))


def real_pairs(model: Path, count: int, prompt_tokens: int, reply_tokens: int) -> list[Pair]:
    """Return pairs cut from the text of a recorded run, each from another place; endings share their prompt only."""
    messages = json.loads(_LOG.read_text(encoding="utf-8"))["messages"]
    text = "\n".join(str(message["content"]) for message in messages)
    ids_T = np.array(load_tokenizer(str(model)).encode(text, add_special_tokens=False), dtype=np.int64)
    size = prompt_tokens + 2 * reply_tokens
    starts = np.linspace(0, ids_T.size - size, count).astype(int)
    if ids_T.size < 2 * size:
        sys.exit(f"{_LOG}: {ids_T.size} tokens are too few for prompts of {prompt_tokens}")
    found = []
    for number, start in enumerate(starts):
        prompt, chosen, rejected = np.split(ids_T[start : start + size], [prompt_tokens, prompt_tokens + reply_tokens])
        if chosen[0] == rejected[0]:
            rejected = np.roll(rejected, 1)
        sides = (_side(f"{number}/{name}", prompt, ids) for name, ids in (("c", chosen), ("r", rejected)))
        found.append(Pair(f"pair {number}", f"pair {number}", "task", *sides))
    return found


def _side(name: str, prompt: IntArray, reply: IntArray) -> tuple[Sample]:
    weights_S = np.zeros(prompt.size + reply.size)
    weights_S[prompt.size :] = 1.0
    return (Sample(name, name, "task", np.concatenate([prompt, reply]), weights_S),)


def _config(model: Path, tokens: int) -> RunConfig:
    return parse_run(
        {
            "model": {"name_or_path": str(model), "dtype": "float32"},
            "adapter": {"rank": RANK, "alpha": RANK},
            "data": {"train": "pairs of pairs.py", "max_tokens": tokens},
            "objective": {"method": "simpo", "beta": 2.0, "gamma": 0.5},
        },
        source="pairs.py",
    )


def _summary(updates: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "losses": [update["loss"] for update in updates],
        "margins": [update["margin"] for update in updates],
        "tokens_an_update": updates[0]["num_tokens"],
        "seconds": [round(update["seconds"], 3) for update in updates],
        "median_s": statistics.median(update["seconds"] for update in updates),
        "median_cpu_s": statistics.median(update["cpu_seconds"] for update in updates),
        "peak_growth_mib": round(updates[-1]["peak_growth_bytes"] / 2**20),
    }


def _loss_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Return the largest relative difference over all updates: later ones see whether the weights moved alike."""
    return max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(ours, theirs, strict=True))


def _gradient_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the relative L2 difference of all gradients as one vector."""
    mine, other = (torch.cat([each[name].double().flatten() for name in sorted(ours)]) for each in (ours, theirs))
    return float((mine - other).norm() / other.norm())


def _print_side(name: str, side: dict[str, Any]) -> None:
    print(
        f"{name:>14}: {side['tokens_an_update']:5d} tokens, median {side['median_s']:7.2f} s "
        f"({side['median_cpu_s']:7.2f} s of processor time) an update, loss {side['losses'][-1]:.6f}, "
        f"peak memory above the model {side['peak_growth_mib']:5d} MiB"
    )
    if name != "shared_prefix":
        print(
            f"{'':>14}  the tree is {side['tree_is_faster_by']:.2f}x as fast and needs "
            f"{side['tree_needs_less_memory_by']:.2f}x less; loss differs by {side['loss_difference_relative']:.1e}, "
            f"gradient by {side['gradient_difference_relative_l2']:.1e}"
        )


def _about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "pairs",
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "traceforge": traceforge.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "peft", "trl")},
        },
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "prompt_tokens": options.prompt_tokens,
        "reply_tokens": options.reply_tokens,
        "timed_updates": options.repeats,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed updates of each contender")
    parser.add_argument("--prompt-tokens", type=int, default=1536)
    parser.add_argument("--reply-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, default=_RESULT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
