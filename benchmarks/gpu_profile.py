"""Where the time of an update goes on the device, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch

_KINDS = (
    ("copy to device", ("HtoD",)),
    ("copy to host", ("DtoH",)),
    ("attention", ("cudnn", "fmha", "flash", "sdpa", "flex")),
    ("matmul", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "gemv", "xmma")),
    ("dequantise", ("_nf4",)),
    ("norm, RoPE, SwiGLU, softmax", ("_rms_norm", "_rotary", "_swiglu", "_logprobs")),
    ("copy on the device", ("DtoD", "Memset", "copy")),
)


def profile_update(update: Callable[[], None], plain_s: float) -> dict[str, object]:
    """Run one update under the profiler and return seconds by kind of kernel, and the time that no kernel computes.

    Args:
        update: one whole update, synchronised.
        plain_s: what it takes without the profiler: idle time is measured against this.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        update()
    kinds: dict[str, float] = {}
    spans: list[tuple[float, float]] = []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        kind = next((kind for kind, words in _KINDS if any(word in event.name for word in words)), "other")
        start, stop = event.time_range.start, event.time_range.end
        kinds[kind] = kinds.get(kind, 0.0) + (stop - start) / 1e6
        if not kind.startswith(("copy to device", "copy to host")):
            spans.append((start, stop))
    busy_s = _union(spans) / 1e6
    return {
        "plain_s": plain_s,
        "computing_s": busy_s,
        "profiled_span_s": (max(stop for _, stop in spans) - min(start for start, _ in spans)) / 1e6,
        "idle_share": max(0.0, 1 - busy_s / plain_s),
        "seconds_by_kind": dict(sorted(kinds.items(), key=lambda each: -each[1])),
    }


def _union(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of time spans."""
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
