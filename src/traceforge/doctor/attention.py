"""The attention kernels that rows can take: which run on this device, are right, and how fast they are.

Speed  Operations of causal attention, 4 H K T^2 / 2 forward and 5/2 of that backward, by the shortest of a few runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from traceforge.doctor.findings import Finding, seconds_of
from traceforge.models.kernels import CpuFlash, CudaEfficient, CudaFlash, Cudnn, Kernel

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
_RIGHT_TOKENS = 256
_HEADS, _GROUPS, _HEAD_SIZE = 8, 2, 64
_TERA = 1e12


def kernels_of(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """Return what a row of this dtype can take there, the fastest on recent cards first."""
    if device.type == "cpu":
        return (CpuFlash(),)
    return (CudaEfficient(),) if dtype == torch.float32 else (Cudnn(), CudaFlash())


def look_at_attention(
    device: torch.device, dtype: torch.dtype, *, kernels: Sequence[Kernel] | None = None, tokens: int | None = None
) -> Finding:
    """Return which kernels work in this dtype, with their speed at `tokens` (8,192 on a card, 1,024 on the CPU)."""
    name = "attention"
    length = tokens or (8192 if device.type == "cuda" else 1024)
    works: list[str] = []
    refused: list[str] = []
    figures: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "tokens": length}
    for kernel in kernels_of(device, dtype) if kernels is None else kernels:
        try:
            error = _error(kernel, device, dtype)
        except RuntimeError as failure:
            refused.append(f"{kernel.name} does not run ({str(failure).strip().splitlines()[0][:100]})")
            continue
        if not error <= _TOLERANCE[dtype]:
            refused.append(f"{kernel.name} is wrong ({error:.1e} from softmax in float32)")
            continue
        forward, backward = _speed(kernel, device, dtype, length)
        works.append(f"{kernel.name} {forward:.3g} / {backward:.3g} TFLOP/s")
        figures |= {f"{kernel.name}_forward_tflops": forward, f"{kernel.name}_backward_tflops": backward}
    said = "; ".join([*works, *refused])
    text = f"{figures['dtype']}, {length:,} tokens, forward / backward: {said}"
    if not works:
        return Finding(
            name, "fail", text, "reinstall torch for this machine, or set model.attention = 'plain'", figures
        )
    if refused:
        return Finding(name, "warn", text, "rows take the kernel that works; update torch and cuDNN for more", figures)
    return Finding(name, "pass", text, figures=figures)


def _error(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> float:
    """Return the worst relative error of output and gradients against softmax in float32."""
    query, key, value, grad = _tensors(device, dtype, _RIGHT_TOKENS)
    scale = _HEAD_SIZE**-0.5
    output, logsumexp = kernel.forward(query, key, value, causal=True, scale=scale)
    found = kernel.backward(grad, (query, key, value), output, logsumexp, causal=True, scale=scale)
    leaves = [each.detach().float().cpu().requires_grad_() for each in (query, key, value)]
    expected = _plain(*leaves, scale=scale)
    gradients = torch.autograd.grad(expected, leaves, grad.float().cpu())
    pairs = zip((output, *found), (expected.detach(), *gradients), strict=True)
    return max(float((one.float().cpu() - other).norm() / other.norm()) for one, other in pairs)


def _plain(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    key, value = (each.repeat_interleave(_HEADS // _GROUPS, dim=1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def _speed(kernel: Kernel, device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[float, float]:
    """Return TFLOP/s of forward and backward."""
    query, key, value, grad = _tensors(device, dtype, tokens)
    scale = _HEAD_SIZE**-0.5
    output, logsumexp = kernel.forward(query, key, value, causal=True, scale=scale)
    operations = 4 * _HEADS * _HEAD_SIZE * tokens * tokens / 2

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    forward = seconds_of(lambda: kernel.forward(query, key, value, causal=True, scale=scale), repeats=3, wait=wait)
    backward = seconds_of(
        lambda: kernel.backward(grad, (query, key, value), output, logsumexp, causal=True, scale=scale),
        repeats=3,
        wait=wait,
    )
    return operations / forward / _TERA, 2.5 * operations / backward / _TERA


def _tensors(device: torch.device, dtype: torch.dtype, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, heads, tokens, _HEAD_SIZE, generator=generator).to(device, dtype)
        for heads in (_HEADS, _GROUPS, _GROUPS, _HEADS)
    )
    return query, key, value, grad
