"""The machine without its cards: processor, memory, disk."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import psutil
import torch

from traceforge.doctor.findings import Finding

_GIB = 2**30
_DEMO_GIB = 5.0
_LOW_DISK_GIB, _NO_DISK_GIB = 10.0, 0.1
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def look_at_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    """Return threads and instruction sets; bfloat16 without instructions for it costs more than twice the time."""
    flags, model = _cpuinfo(cpuinfo)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    narrow = sorted({"avx512_bf16", "amx_bf16", "bf16"} & flags)
    text = (
        f"{model or platform.processor() or platform.machine()}, {threads} threads ({torch.get_num_threads()} used), "
        f"{torch.backends.cpu.get_cpu_capability()}, bfloat16 instructions: {', '.join(narrow) or 'none'}"
    )
    figures = {"threads": threads, "threads_used": torch.get_num_threads(), "bfloat16_instructions": bool(narrow)}
    if narrow or torch.cuda.is_available():
        return Finding("processor", "pass", text, figures=figures)
    way_out = "runs on this CPU: set model.dtype = 'float32'; bfloat16 takes more than twice the time here"
    return Finding("processor", "warn", text, way_out, figures)


def look_at_memory(limits: tuple[str, ...] = _CGROUP_LIMITS) -> Finding:
    """Return what this process may still take: free memory, or what a container leaves of it."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limit = _container_limit(limits)
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - psutil.Process().memory_info().rss)
    text = f"{free / _GIB:.1f} GiB free of {total / _GIB:.1f}"
    text += " (limit of the container)" if limit is not None and limit == total else ""
    figures = {"free_bytes": free, "total_bytes": total}
    if free >= _DEMO_GIB * _GIB:
        return Finding("memory", "pass", text, figures=figures)
    way_out = f"the demo takes {_DEMO_GIB:.0f} GiB; end other programs, or ask `traceforge plan RUN.toml` what fits"
    return Finding("memory", "warn", text, way_out, figures)


def look_at_disk(folder: Path) -> Finding:
    """Return the free space where runs are written."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free / _GIB:.1f} GiB free for {folder}"
    figures = {"free_bytes": free}
    if not os.access(existing, os.W_OK):
        return Finding("disk", "fail", f"{existing} cannot be written", "set output_dir to a folder that can", figures)
    if free >= _LOW_DISK_GIB * _GIB:
        return Finding("disk", "pass", text, figures=figures)
    way_out = "free space, or set output_dir to another disk; adapters are small, models and full checkpoints are not"
    return Finding("disk", "warn" if free >= _NO_DISK_GIB * _GIB else "fail", text, way_out, figures)


def _cpuinfo(path: Path) -> tuple[set[str], str]:
    flags: set[str] = set()
    model = ""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return flags, model
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in {"flags", "features"}:
            flags |= set(value.split())
        elif key.strip() == "model name":
            model = value.strip()
    return flags, model


def _container_limit(limits: tuple[str, ...]) -> int | None:
    for name in limits:
        try:
            return int(Path(name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue  # not there, or `max`
    return None
