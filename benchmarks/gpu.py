"""Long context on one card: ours and what a user would pick instead, side by side, in one call. Needs a CUDA device.

    python benchmarks/gpu.py [--out benchmarks/results/gpu-lean.json] [--budget-s 560] [--full]
        [--only PROCESS ...] [--jobs JOB ...]

Each contender is a process of its own (`gpu_ours.py`, `gpu_peers.py`) and loads the same checkpoint of random weights
of a named shape. Times are of whole updates (batch 1, LoRA of rank 16 on the seven linears, AdamW) after a warm-up;
ratios are between processes of this call only. A process that no longer fits into the budget is named as not run.

`python benchmarks/gpu_table.py` writes `docs/performance.md` from the saved results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_shapes import write_checkpoint

HERE = Path(__file__).resolve().parent
LENGTH, SHORT = 32_768, 18_489
PROMPT, REPLY = 77_824, 4_096
TURNS = 30
PEERS = ("unsloth", "trl+liger", "transformers")


class Process(NamedTuple):
    """One process: its name, script with arguments, jobs, checkpoint and the seconds it may take."""

    name: str
    script: tuple[str, ...]
    jobs: list[dict[str, Any]]
    checkpoint: tuple[str, str]
    limit_s: int


def processes(full: bool) -> list[Process]:
    """Return what is measured, the most important first."""
    nf4 = ("qwen3-8b", "nf4")
    once = {"warmups": 0, "repeats": 1}
    planned = [
        Process("ceilings", ("gpu_ceilings.py",), [], nf4, 40),
        Process(
            "ours, resident",
            ("gpu_ours.py", "CHECKPOINT", "resident"),
            [
                {"name": "sft", "work": {"sft": LENGTH}, "profile": True},
                {"name": "sft short", "work": {"sft": SHORT}},
                {"name": "tree", "work": {"turns": [TURNS, LENGTH]}},
                {"name": "apart", "work": {"apart": [TURNS, LENGTH]}, **once},
                {"name": "growth 8192", "work": {"sft": 8192}},
                {"name": "growth 65536", "work": {"sft": 65_536}, "warmups": 1, "repeats": 1},
            ],
            nf4,
            200,
        ),
        Process(
            "unsloth",
            ("gpu_peers.py", "unsloth", "CHECKPOINT"),
            [
                {"name": "sft", "work": {"sft": LENGTH}},
                {"name": "sft short", "work": {"sft": SHORT}},
                {"name": "branch", "work": {"branch": [PROMPT, REPLY]}, "warmups": 1, "repeats": 1},
            ],
            nf4,
            170,
        ),
        Process(
            "ours, streamed",
            ("gpu_ours.py", "CHECKPOINT", "streamed"),
            [
                {"name": "sft streamed", "work": {"sft": LENGTH}, "cap_gib": 3},
                {"name": "sft throttled", "work": {"sft": LENGTH}, "cap_gib": 3, "copies": 4},
                {"name": "pair", "work": {"pair": [PROMPT, REPLY]}, "cap_gib": 6, "warmups": 1, "repeats": 1},
            ],
            nf4,
            170,
        ),
        Process(
            "ours, longest",
            ("gpu_ours.py", "CHECKPOINT", "streamed"),
            [{"name": "longest", "work": {"sft": 262_144}, "cap_gib": 24, "recompute": True, **once}],
            nf4,
            290,
        ),
        *(
            Process(peer, ("gpu_peers.py", peer, "CHECKPOINT"), [{"name": "sft", "work": {"sft": LENGTH}}], nf4, 110)
            for peer in PEERS[1:]
        ),
    ]
    if full:
        small, plain = ("qwen3-0.6b", "nf4"), ("qwen3-8b", "none")
        sft = [{"name": "sft", "work": {"sft": LENGTH}}]
        planned += [
            Process("ours, 131072", ("gpu_ours.py", "CHECKPOINT", "streamed"),
                    [{"name": "growth 131072", "work": {"sft": 131_072}, **once}], nf4, 120),
            Process("ours, 0.6B", ("gpu_ours.py", "CHECKPOINT", "resident"), sft, small, 60),
            Process("unsloth, 0.6B", ("gpu_peers.py", "unsloth", "CHECKPOINT"), sft, small, 90),
            Process("ours, bf16 base", ("gpu_ours.py", "CHECKPOINT", "resident"), sft, plain, 120),
            Process("ours, bf16 base streamed", ("gpu_ours.py", "CHECKPOINT", "streamed"), sft, plain, 120),
        ]  # fmt: skip
    return planned


def chosen(planned: list[Process], only: list[str] | None, jobs: list[str] | None) -> list[Process]:
    """Return the processes of these names, in their order, with the jobs of these names; None = all.

    A process without a job is left out.
    """
    by_name = {process.name: process for process in planned}
    kept = [by_name[name] for name in only] if only else planned
    if jobs:
        kept = [each._replace(jobs=[job for job in each.jobs if job["name"] in jobs]) for each in kept]
        kept = [each for each in kept if each.jobs or each.name == "ceilings"]
    return kept


def run(process: Process, checkpoints: Path) -> list[dict[str, Any]]:
    """Run a process and return its results; one that fails or runs out of time is a result that says so."""
    folder = checkpoints / "-".join(process.checkpoint)
    if process.jobs and not folder.exists():
        write_checkpoint(*process.checkpoint, folder, "cuda")
        torch.cuda.empty_cache()
    arguments = [str(folder) if each == "CHECKPOINT" else each for each in process.script[1:]]
    source = str(HERE.parent / "src")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([source, str(HERE), os.environ.get("PYTHONPATH", "")]),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, str(HERE / process.script[0]), *arguments]
    failure = None
    try:
        done = subprocess.run(
            command, input=json.dumps(process.jobs), capture_output=True, text=True, timeout=process.limit_s,
            env=environment, cwd=checkpoints, check=False,
        )  # fmt: skip
        output = done.stdout
        if done.returncode != 0:
            failure = (done.stderr or done.stdout).strip()[-600:]
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        failure = f"no end within {process.limit_s} s"
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines]
    for each in found:
        each |= {"process": process.name, "shape": process.checkpoint[0], "quantization": process.checkpoint[1]}
    if failure is not None:
        found.append({"process": process.name, "failure": failure})
    return found


def main() -> None:
    """Measure everything that fits into the budget; the file is whole after each process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu-lean.json")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--full", action="store_true", help="also 131,072 tokens, a 0.6B shape and a bf16 base")
    parser.add_argument("--call", default="ours and the peers", help="what docs/performance.md calls this call")
    parser.add_argument("--only", nargs="*", help="names of processes")
    parser.add_argument("--jobs", nargs="*", help="names of jobs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this benchmark needs a CUDA device, and torch finds none")
    started = time.perf_counter()
    result: dict[str, Any] = {
        "call": options.call,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "results": [],
        "not_run": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="traceforge-gpu-") as folder:
        for process in chosen(processes(options.full), options.only, options.jobs):
            left_s = options.budget_s - (time.perf_counter() - started)
            if left_s < process.limit_s / 2:
                result["not_run"].append(process.name)
                print(f"{process.name}: not run, {left_s:.0f} s are left", flush=True)
                continue
            begun = time.perf_counter()
            found = run(process._replace(limit_s=int(min(left_s, process.limit_s))), Path(folder))
            result["results"] += found
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(f"{process.name}: {time.perf_counter() - begun:.0f} s", flush=True)
            for each in found:
                print("  " + json.dumps({key: each.get(key) for key in _SHOWN if key in each}), flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


_SHOWN = ("name", "who", "s", "first_s", "tokens", "peak_allocated_gib", "peak_reserved_gib", "host_pinned_gib",
          "cap_gib", "out_of_memory", "failure", "matmul", "attention_forward", "attention_backward")  # fmt: skip
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "triton", "unsloth", "trl", "liger-kernel")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
