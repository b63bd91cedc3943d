"""What is followed through a run from outside: the trained weights, the first gradient, seconds and peak memory.

Whoever trains says when an update begins, when its gradient is about to be applied and when it is done. What the
watching itself costs is left out of the seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]


@dataclass
class RunWatch:
    """Follows a network through its updates.

    Cost: one copy of the trained weights per update, one of the first gradient, one comparison per micro-batch.
    """

    network: nn.Module
    early_changes: int = 0
    after: list[Weights] = field(default_factory=list)
    first_gradient: Weights = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = trained_weights(self.network)
        self._device = next(self.network.parameters()).device
        self._peak = PeakMemory(self._device)
        self._began = self._aside_s = 0.0

    def update_begins(self) -> None:
        """Start the clock of an update, and at the first one the measure of memory."""
        if not self.after:
            self._peak.start()
        self._synchronize()
        self._began, self._aside_s = time.perf_counter(), 0.0

    def inside_update(self) -> None:
        """Note whether the weights still are what the last update left."""
        with self._aside():
            last = self.after[-1] if self.after else self.before
            now = trained_weights(self.network)
            self.early_changes += any(not torch.equal(now[name], last[name]) for name in last)

    def gradient_ready(self) -> None:
        """Keep the gradient that the optimizer is about to be given, of the first update only."""
        with self._aside():
            if not self.after:
                self.first_gradient = {
                    name: torch.zeros_like(parameter, device="cpu")
                    if parameter.grad is None
                    else parameter.grad.detach().to("cpu", copy=True)
                    for name, parameter in self.network.named_parameters()
                    if parameter.requires_grad
                }

    def update_done(self) -> None:
        """Stop the clock and keep the weights of a finished update."""
        self._synchronize()
        self.seconds.append(time.perf_counter() - self._began - self._aside_s)
        self.after.append(trained_weights(self.network))

    def peak_bytes(self) -> int | None:
        """Return by how much memory has grown at most since the first update began; None if it cannot be told."""
        return self._peak.growth_bytes()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._synchronize()
        began = time.perf_counter()
        yield
        self._aside_s += time.perf_counter() - began

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class PeakMemory:
    """Growth of memory from `start` to its peak: allocated bytes on a CUDA device, else the resident set (Linux only).

    Memory that the process has freed and not given back would hide what comes after it: `start` gives it back first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes: int | None = None

    def start(self) -> None:
        """Make the peak count from now on."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start_bytes = torch.cuda.memory_allocated(self._device)
            return
        with contextlib.suppress(OSError, AttributeError):  # another system, or another C library
            ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._start_bytes = _status_bytes("VmRSS")
        except (OSError, StopIteration):
            self._start_bytes = None

    def growth_bytes(self) -> int | None:
        """Return the growth so far; None before `start` and where the system does not tell."""
        if self._start_bytes is None:
            return None
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) - self._start_bytes
        return max(0, _status_bytes("VmHWM") - self._start_bytes)


def trained_weights(network: nn.Module) -> Weights:
    """Return a copy of every trained parameter by name, on the CPU."""
    return {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
