"""What watching a run costs: the processor time that sampling adds to the work beside it, as a share of that work.

    python benchmarks/monitor.py [--rounds 12] [--json FILE]

Work     Products of matrices in torch, some seconds of processor time, beside the monitor.
Rivals   `off`: the work alone. `on`: with a sampler that samples 20 times as often as a run does, so that the
         difference is larger than the noise; it is divided by 20. They take turns, and medians count.
Cards    Through the real driver where there is one. Without one through stand-ins: a library whose calls return at
         once (what the monitor itself costs), and a program `nvidia-smi` that prints recorded lines (what starting one
         costs; its own processor time is counted, too).
Must     Less than 0.5% of the work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from traceforge.monitor.nvidia_smi import NvidiaSmi
from traceforge.monitor.readings import Card, MonitorError, Reading, Source
from traceforge.monitor.sampler import INTERVAL_S, Sampler
from traceforge.monitor.sources import open_source

_HERE = Path(__file__).resolve().parent
_RESULT = _HERE / "results" / "monitor-cpu.json"
_OFTENER = 20
_WORK_S = 2.0
MOST_SHARE = 0.005
_SMI = """#!/bin/sh
case "$1" in
-L) echo "GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-aaaa)" ;;
*uuid*) echo "0, GPU-aaaa, NVIDIA GeForce RTX 3090, 24576, 580.65.06, 4, 16, 4, 16" ;;
*) echo "0, 6144, 24576, 97, 40, 300.00, 61" ;;
esac
"""


class Immediate:
    """Cards that answer at once."""

    name = "stand-in library"

    def cards(self) -> list[Card]:
        """Return one card."""
        return [Card(0, "GPU-aaaa")]

    def read(self, cards: list[Card]) -> list[Reading]:
        """Return one reading a card."""
        return [Reading(6144.0, 24576.0, 97.0, 40.0, 300.0, 61.0) for _ in cards]

    def close(self) -> None:
        """Hold nothing."""


def processor_s() -> float:
    """Return the processor seconds of this process and of those it has started and waited for."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def products_of(matrix: torch.Tensor, count: int) -> None:
    """Multiply a matrix with itself."""
    for _ in range(count):
        torch.mm(matrix, matrix)


def measure(source: Callable[[], tuple[Source | None, list[Card]]], rounds: int) -> dict[str, float]:
    """Return the share of the work that sampling at a run's own interval takes."""
    matrix = torch.randn(512, 512)
    count = 1
    while True:
        started = time.perf_counter()
        products_of(matrix, count)
        if (taken := time.perf_counter() - started) >= 0.5:
            break
        count *= 2
    count = max(1, round(count * _WORK_S / taken))
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for turn in range(2 * rounds):
        name = "on" if (turn + turn // 2) % 2 else "off"
        with tempfile.TemporaryDirectory() as folder:
            found, cards = source()
            sampler = Sampler(Path(folder), found, cards, interval_s=INTERVAL_S / _OFTENER)
            before = processor_s()
            if name == "on":
                sampler.start()
            products_of(matrix, count)
            if name == "on":
                sampler.stop()
            seconds[name].append(processor_s() - before)
    off, on = (statistics.median(seconds[name]) for name in ("off", "on"))
    return {"work_s": off, "with_monitor_s": on, "share": (on - off) / off / _OFTENER}


def main() -> None:
    """Measure each source and say whether the monitor is cheap enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, default=_RESULT)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    try:
        real, _ = open_source()
        real.close()
        results[real.name] = measure(open_source, options.rounds)
    except MonitorError:
        immediate = Immediate()
        results["host only"] = measure(lambda: (None, []), options.rounds)
        results[immediate.name] = measure(lambda: (immediate, immediate.cards()), options.rounds)
        with tempfile.TemporaryDirectory() as folder:
            tool = Path(folder) / "nvidia-smi"
            tool.write_text(_SMI, encoding="ascii")
            tool.chmod(0o755)
            os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
            smi = NvidiaSmi()
            results["stand-in nvidia-smi"] = measure(lambda: (smi, smi.cards()), options.rounds)
    for name, found in results.items():
        print(f"{name:<22} {found['share']:+.3%} of the work (limit {MOST_SHARE:.1%})")
    record = {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "interval_s": INTERVAL_S,
        "sampled_times_as_often": _OFTENER,
        "limit": MOST_SHARE,
        "results": results,
    }
    options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if any(found["share"] > MOST_SHARE for found in results.values()):
        sys.exit("the monitor costs too much")


if __name__ == "__main__":
    main()
