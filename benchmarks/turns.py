"""Contenders that take turns: each a process with a memory of its own, one at work while the others wait.

`take_turns` is the referee's side. A contender is a script that makes a `Turns`: a line on stdin starts its next
update, a line of JSON on stdout answers with what it took. So contenders share a machine whose load changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

from traceforge.training.measure import peak_host_bytes


def take_turns(script: Path, names: Sequence[str], work: Any, *, num_updates: int) -> dict[str, list[dict[str, Any]]]:
    """Return what each contender tells of each update; one works while the others wait.

    Args:
        script: run once for each of `names`, with the name and the path of the pickled `work`.
    """
    with tempfile.TemporaryDirectory(prefix="traceforge-turns-") as folder:
        path = Path(folder) / "work.pickle"
        path.write_bytes(pickle.dumps(work))
        running = {
            name: subprocess.Popen(
                [sys.executable, str(script), name, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(Path(folder) / name).open("wb"),
                text=True,
            )
            for name in names
        }
        try:
            for name, process in running.items():
                _answer(name, process, Path(folder))
            told: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for _ in range(num_updates):
                for name, process in running.items():
                    print("go", file=process.stdin, flush=True)
                    told[name].append(_answer(name, process, Path(folder)))
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    return told


def _answer(name: str, process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"contender {name} ended:\n{(folder / name).read_text(errors='replace')[-3000:]}")
    answer: dict[str, Any] = json.loads(line)
    return answer


class Turns:
    """A contender's side of the conversation: wait, work, tell."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints must not get between the answers
        self._resident_bytes = 0

    def ready(self) -> None:
        """Say that the model is loaded."""
        self._answer({"ready": True})

    def wait(self) -> None:
        """Return when the next update is to be made, and start the clocks."""
        if not sys.stdin.readline():
            sys.exit(1)
        if not self._resident_bytes:
            _give_back()
            _forget_peak()
            self._resident_bytes = psutil.Process().memory_info().rss
        self._cpu_began, self._began = time.process_time(), time.perf_counter()

    def stop(self) -> None:
        """Stop the clocks."""
        self._seconds, self._cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu_began

    def tell(self, loss: float, **more: Any) -> None:
        """Answer with the update that was made."""
        growth = _peak_bytes() - self._resident_bytes
        _give_back()  # the others need it while this one waits
        self._answer(
            {
                "loss": loss,
                "seconds": self._seconds,
                "cpu_seconds": self._cpu_seconds,
                "peak_growth_bytes": growth,
                **more,
            }
        )

    def _answer(self, figures: dict[str, Any]) -> None:
        self._answers.write(json.dumps(figures) + "\n")
        self._answers.flush()


def _give_back() -> None:
    """Return what loading has freed to the system: it would hide as much growth."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    """Make the peak count from now on, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def _peak_bytes() -> int:
    """Return the peak resident size; not `ru_maxrss` where it can be helped, which starts at the parent's."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return peak_host_bytes()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
