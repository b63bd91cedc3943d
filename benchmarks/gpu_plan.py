"""Planned against measured on one card: the planner's peaks beside what torch allocates; doctor and monitor at work.

    python benchmarks/gpu_plan.py --out DIR [--budget-s 560]

Rows     Qwen3-8B's shape in NF4 with LoRA of rank 16, random weights: SFT of 18,489, 32,768 and 131,072 tokens, one
         preference pair of 77,824 + 2 x 4,096 tokens; layers' weights resident and streamed. Updates as `gpu_ours.py`
         makes them; loading does not count.
Leaves   doctor.txt and doctor.json of this machine; gpu.csv and host.csv of the whole call, by the monitor; plan.json:
         each row planned and measured, device and pinned host, time estimated and measured, mean power in its updates.
Must     No predicted peak is more than 8% off, or more than 3% below.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from traceforge.monitor.readings import Card, MonitorError, Source, select_cards
from traceforge.monitor.sampler import Sampler
from traceforge.monitor.sources import open_source
from traceforge.planning.lean_path import lean_ledger
from traceforge.planning.model_config import find_shape
from traceforge.planning.rates import estimate, rates_of
from traceforge.planning.setup import setup_of
from traceforge.run_files import parse_run

_HERE = Path(__file__).resolve().parent
GIB = 2**30
MOST_ABOVE, MOST_BELOW = 0.08, 0.03
PROMPT, REPLY = 77_824, 4_096
JOBS: tuple[tuple[str, list[dict[str, Any]], int], ...] = (
    ("resident", [{"name": "sft 18489", "work": {"sft": 18_489}}, {"name": "sft 32768", "work": {"sft": 32_768}}], 150),
    (
        "streamed",
        [
            {"name": "sft 18489", "work": {"sft": 18_489}},
            {"name": "sft 32768", "work": {"sft": 32_768}},
            {"name": "pair 80K", "work": {"pair": [PROMPT, REPLY]}, "warmups": 1, "repeats": 1},
            {"name": "sft 131072", "work": {"sft": 131_072}, "warmups": 1, "repeats": 1},
        ],
        330,
    ),
)


def _python_path() -> str:
    """Return where a process of ours finds its modules: this tree, then whatever this process was told."""
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return os.pathsep.join([str(_HERE.parent / "src"), str(_HERE), *given])


def examine(out: Path) -> dict[str, Any]:
    """Run the doctor, keep what it prints, and return its document."""
    environment = os.environ | {"PYTHONPATH": _python_path()}
    found: dict[str, Any] = {}
    for name, options in (("doctor.txt", []), ("doctor.json", ["--json"])):
        done = subprocess.run(
            [sys.executable, "-m", "traceforge", "doctor", *options],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        (out / name).write_text(done.stdout + done.stderr, encoding="utf-8")
        if options and done.stdout:
            found = json.loads(done.stdout)
    return found


def run_jobs(placement: str, jobs: list[dict[str, Any]], checkpoint: Path, limit_s: float) -> list[dict[str, Any]]:
    """Return what `gpu_ours.py` measures in a process of its own; a failure is a result that says so."""
    environment = os.environ | {
        "PYTHONPATH": _python_path(),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        done = subprocess.run(
            [sys.executable, str(_HERE / "gpu_ours.py"), str(checkpoint), placement],
            input=json.dumps(jobs), capture_output=True, text=True, timeout=limit_s, check=False, env=environment,
        )  # fmt: skip
        output, failure = done.stdout, None if done.returncode == 0 else done.stderr.strip()[-600:]
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        failure = f"no end within {limit_s:.0f} s"
    found = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    return [*found, *([{"failure": failure, "placement": placement}] if failure else [])]


def beside_plan(measured: dict[str, Any], checkpoint: Path, card: str) -> dict[str, Any]:
    """Return a measured row with what was planned for it."""
    work = measured["work"]
    tokens = work["sft"] if "sft" in work else work["pair"][0] + 2 * work["pair"][1]
    trained = tokens - 1 if "sft" in work else 2 * work["pair"][1]
    config = parse_run(
        {
            "model": {"name_or_path": str(checkpoint), "quantization": "nf4"},
            "data": {"train": "rows", "max_tokens": tokens, "group": "none"},
            "training": {"samples_per_update": 1, "tokens_per_row": tokens},
            "optimizer": {"offload_state": measured["placement"] == "streamed"},
            "memory": {"path": "lean", "placement": measured["placement"]},
        },
        source="gpu_plan.py",
    )
    shape = find_shape(str(checkpoint))
    setup = setup_of(config, shape, "cuda", row_tokens=tokens, target_tokens=trained)
    ledger = lean_ledger(shape, setup, rectangles="pair" in work or tokens % 1024 != 0)
    planned_gib = ledger.update_peak.total / GIB
    off = planned_gib / measured["peak_allocated_gib"] - 1
    return {
        "name": measured["name"],
        "placement": measured["placement"],
        "row_tokens": tokens,
        "trained_tokens": trained,
        "planned_gib": planned_gib,
        "measured_gib": measured["peak_allocated_gib"],
        "measured_reserved_gib": measured["peak_reserved_gib"],
        "off": off,
        "within_limits": -MOST_BELOW <= off <= MOST_ABOVE,
        "moment": ledger.update_peak.name,
        "planned_moments_gib": {each.name: each.total / GIB for each in ledger.moments},
        "planned_pinned_gib": sum(ledger.pinned.values()) / GIB,
        "measured_pinned_gib": measured["host_pinned_gib"],
        "planned_s": _seconds(shape, setup, card),
        "measured_s": measured["s"],
    }


def _seconds(shape: Any, setup: Any, card: str) -> float | None:
    try:
        return estimate(shape, setup, rates_of(card)).seconds
    except ValueError:  # a card that has not been measured
        return None


def watched_card() -> tuple[Source | None, list[Card]]:
    """Return what the first card of this process is read through, and that card."""
    try:
        source, cards = open_source()
        return source, select_cards(cards, (str(torch.cuda.get_device_properties(0).uuid),))
    except MonitorError as error:
        print(f"not watched: {error}")
        return None, []


def main() -> None:
    """Measure every row and compare it with its plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=560.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    from gpu_shapes import write_checkpoint

    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    def save(**more: Any) -> None:
        """Write what is known so far: a call that is ended early leaves the rows that it measured."""
        record = {
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "card": card,
            "torch": torch.__version__,
            "limits": {"above": MOST_ABOVE, "below": MOST_BELOW},
            "rows": rows,
            "failures": failures,
            "doctor": doctor.get("counts"),
            **more,
        }
        (options.out / "plan.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    card = torch.cuda.get_device_name(0)
    source, cards = watched_card()
    sampler = Sampler(options.out, source, cards)
    sampler.start()
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    doctor = examine(options.out)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "qwen3-8b-nf4"
        write_checkpoint("qwen3-8b", "nf4", checkpoint, "cuda")
        torch.cuda.empty_cache()
        for placement, jobs, limit_s in JOBS:
            left = options.budget_s - (time.monotonic() - started)
            begun = time.monotonic()
            for found in run_jobs(placement, jobs, checkpoint, max(1.0, min(limit_s, left))):
                if "peak_allocated_gib" in found:
                    rows.append(beside_plan(found, checkpoint, card))
                else:
                    failures.append(found)
            save()
            energy = sampler.energy_j(begun, time.monotonic())
            print(
                f"{placement}: {time.monotonic() - begun:.0f} s, energy {energy if energy is None else round(energy)} J"
            )
    sampler.stop()
    power = sampler.cards_series[0].summary("power_draw_w") if sampler.cards_series else None
    save(power_w=None if power is None else {"mean": power.mean, "peak": power.peak, "samples": power.samples})
    for row in rows:
        print(
            f"{row['name']:<12} {row['placement']:<9} planned {row['planned_gib']:6.2f} GiB, measured "
            f"{row['measured_gib']:6.2f} ({row['off']:+.1%}) at {row['moment']}; pinned "
            f"{row['planned_pinned_gib']:.1f} / {row['measured_pinned_gib']:.1f} GiB; {row['measured_s']:.2f} s"
        )
    if failures or not rows or not all(row["within_limits"] for row in rows):
        sys.exit("a row failed, or a plan is off by more than the limits")


if __name__ == "__main__":
    main()
