"""Copies between host and card, from pinned memory and back; without a card, within the host."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from traceforge.doctor.findings import Finding, seconds_of

_BYTES = 256 * 2**20
_CPU_BYTES = 64 * 2**20
_GIGA = 1e9
_SLOW_GB_PER_S = 8.0


def look_at_transfers(device: torch.device, *, version: Path = Path("/proc/version")) -> Finding:
    """Return the bandwidth of copies; pinned memory that cannot be had, or that WSL limits, is named."""
    if device.type != "cuda":
        source, target = (torch.empty(_CPU_BYTES, dtype=torch.uint8) for _ in range(2))
        source.fill_(1)
        rate = _CPU_BYTES / seconds_of(lambda: target.copy_(source), repeats=3, wait=lambda: None) / _GIGA
        text = f"within the host {rate:.1f} GB/s; pinned memory is for cards"
        return Finding("copies", "pass", text, figures={"host_gb_per_s": rate})
    try:
        pinned = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        way_out = f"raise the limit of locked memory (ulimit -l, now {_locked_limit()}), or free host memory"
        return Finding("copies", "warn", f"no pinned memory: {first}; offloading would be slow", way_out)
    on_card = torch.empty(_BYTES, dtype=torch.uint8, device=device)

    def rate_of(target: torch.Tensor, source: torch.Tensor) -> float:
        seconds = seconds_of(
            lambda: target.copy_(source, non_blocking=True), repeats=3, wait=lambda: torch.cuda.synchronize(device)
        )
        return _BYTES / seconds / _GIGA

    to_card, to_host = rate_of(on_card, pinned), rate_of(pinned, on_card)
    text = f"pinned memory to the card {to_card:.1f} GB/s, back {to_host:.1f} GB/s"
    figures = {"to_card_gb_per_s": to_card, "to_host_gb_per_s": to_host, "wsl": _is_wsl(version)}
    if _is_wsl(version):
        way_out = (
            "give WSL more memory in .wslconfig: about half of it can be pinned, and running out looks like CUDA OOM"
        )
        return Finding("copies", "warn", f"{text}; under WSL pinned memory is scarce", way_out, figures)
    if min(to_card, to_host) < _SLOW_GB_PER_S:
        way_out = "check that the card sits in a full-width slot (line `card`); streamed weights will wait for it"
        return Finding("copies", "warn", f"{text}: slow", way_out, figures)
    return Finding("copies", "pass", text, figures=figures)


def _is_wsl(version: Path) -> bool:
    try:
        return "microsoft" in version.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def _locked_limit() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
