"""Triton kernels of the lean layer path: one pass over memory each, arithmetic in float32.

Imported only where Triton and a CUDA device are there; `layer_maths.py` has the same functions in plain torch and
says what each computes. Every tensor has unit stride in its last dimension; row strides are free.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x_ptr, weight_ptr, y_ptr, x_stride, y_stride, eps, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(y_ptr + row * y_stride + at, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dy_stride, x_stride, dx_stride, eps,
    width: tl.constexpr, block: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32) * weight
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    unit = x * scale
    dx = scale * (dy - unit * (tl.sum(dy * unit, 0) / width))
    into = dx_ptr + row * dx_stride + at
    if adds:
        dx += tl.load(into, mask=inside, other=0.0).to(tl.float32)
    tl.store(into, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotary(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr, x_token, x_head, y_token, y_head, angle_stride, tokens, eps,
    half: tl.constexpr, block: tl.constexpr, block_tokens: tl.constexpr, has_norm: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    at = tl.arange(0, block)[None, :]
    inside = (token < tokens) & (at < half)
    x = x_ptr + token * x_token + head * x_head + at
    low = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * angle_stride + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + at, mask=inside, other=0.0).to(tl.float32)
    if has_norm:
        weight_low = tl.load(weight_ptr + at, mask=at < half, other=0.0).to(tl.float32)
        weight_high = tl.load(weight_ptr + at + half, mask=at < half, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * half) + eps)[:, None]
        low = low * scale * weight_low
        high = high * scale * weight_high
    y = y_ptr + token * y_token + head * y_head + at
    tl.store(y, (low * cos - high * sin).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(y + half, (high * cos + low * sin).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_backward(
    dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dy_token, dy_head, x_token, x_head, angle_stride, tokens, eps,
    half: tl.constexpr, block: tl.constexpr, block_tokens: tl.constexpr, has_norm: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    at = tl.arange(0, block)[None, :]
    inside = (token < tokens) & (at < half)
    dy = dy_ptr + token * dy_token + head * dy_head + at
    dy_low = tl.load(dy, mask=inside, other=0.0).to(tl.float32)
    dy_high = tl.load(dy + half, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * angle_stride + at, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * angle_stride + at, mask=inside, other=0.0).to(tl.float32)
    low = dy_low * cos + dy_high * sin
    high = dy_high * cos - dy_low * sin
    x = x_ptr + token * x_token + head * x_head + at
    if has_norm:
        x_low = tl.load(x, mask=inside, other=0.0).to(tl.float32)
        x_high = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt((tl.sum(x_low * x_low, 1) + tl.sum(x_high * x_high, 1)) / (2 * half) + eps)[:, None]
        low = low * tl.load(weight_ptr + at, mask=at < half, other=0.0).to(tl.float32)
        high = high * tl.load(weight_ptr + at + half, mask=at < half, other=0.0).to(tl.float32)
        x_low = x_low * scale
        x_high = x_high * scale
        mean = ((tl.sum(low * x_low, 1) + tl.sum(high * x_high, 1)) / (2 * half))[:, None]
        low = scale * (low - x_low * mean)
        high = scale * (high - x_high * mean)
    tl.store(x, low.to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(x + half, high.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, in_stride, out_stride, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gate = tl.load(gate_up_ptr + row * in_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * in_stride + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + at, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up_ptr, hidden_ptr, in_stride, hidden_stride, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gates = gate_up_ptr + row * in_stride + at
    hiddens = hidden_ptr + row * hidden_stride + at
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(hiddens, mask=inside, other=0.0).to(tl.float32)
    gating = tl.sigmoid(gate)
    active = gate * gating
    dtype = gate_up_ptr.dtype.element_ty
    tl.store(gates, (grad * up * (gating + active * (1.0 - gating))).to(dtype), mask=inside)
    tl.store(gates + width, (grad * active).to(dtype), mask=inside)
    tl.store(hiddens, (active * up).to(dtype), mask=inside)


@triton.jit
def _logprobs(logits_ptr, target_ptr, logp_ptr, stride, vocabulary: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    target = tl.load(target_ptr + row)
    chosen = tl.load(logits + target).to(tl.float32)
    top = float("-inf")
    total = 0.0
    for start in range(0, vocabulary, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
    logz = top + tl.log(total)
    tl.store(logp_ptr + row, chosen - logz)
    tl.debug_barrier()  # no thread may overwrite a logit that another one still reads
    for start in range(0, vocabulary, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        derivative = tl.where(at == target, 1.0, 0.0) - tl.exp(x - logz)
        tl.store(logits + at, derivative.to(logits_ptr.dtype.element_ty), mask=at < vocabulary)


@triton.jit
def _nf4(
    packed_ptr, levels_ptr, absmax_ptr, absmax_levels_ptr, absmax2_ptr, offset_ptr, out_ptr, out_stride, columns,
    num_bytes, block_size: tl.constexpr, block_size2: tl.constexpr, nested: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    at = program * block + tl.arange(0, block)
    inside = at < num_bytes
    byte = tl.load(packed_ptr + at, mask=inside, other=0).to(tl.int32)
    scale_at = (2 * at) // block_size
    if nested:
        level = tl.load(absmax_ptr + scale_at, mask=inside, other=0).to(tl.int32)
        scale = tl.load(absmax_levels_ptr + level) * tl.load(
            absmax2_ptr + scale_at // block_size2, mask=inside, other=0.0
        ) + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + scale_at, mask=inside, other=0.0)
    first = tl.load(levels_ptr + (byte >> 4)) * scale
    second = tl.load(levels_ptr + (byte & 15)) * scale
    element = program * (2 * block) + tl.arange(0, 2 * block)
    into = out_ptr + (element // columns) * out_stride + element % columns
    value = tl.interleave(first, second)
    tl.store(into, value.to(out_ptr.dtype.element_ty), mask=element < 2 * num_bytes)


@triton.jit
def _gather_rows(table_ptr, id_ptr, out_ptr, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(id_ptr + row).to(tl.int64)
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        tl.store(out_ptr + row * width + at, tl.load(table_ptr + source * width + at, mask=at < width), mask=at < width)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor) -> None:
    """See `layer_maths.rms_norm`."""
    tokens, width = x_TD.shape
    block = triton.next_power_of_2(width)
    _rms_norm[(tokens,)](x_TD, weight_D, out_TD, x_TD.stride(0), out_TD.stride(0), eps, width, block, num_warps=8)


def rms_norm_backward(
    dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, into_TD: Tensor, *, adds: bool
) -> None:
    """See `layer_maths.rms_norm_backward_`."""
    tokens, width = x_TD.shape
    _rms_norm_backward[(tokens,)](
        dy_TD, x_TD, weight_D, into_TD, dy_TD.stride(0), x_TD.stride(0), into_TD.stride(0), eps,
        width, triton.next_power_of_2(width), adds, num_warps=8,
    )  # fmt: skip


_ROTARY_TOKENS = 16


def rotary(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor, weight_K: Tensor | None, eps: float, out_THK: Tensor) -> None:
    """See `layer_maths.rotary`."""
    tokens, heads, size = x_THK.shape
    _rotary[(triton.cdiv(tokens, _ROTARY_TOKENS), heads)](
        x_THK, x_THK if weight_K is None else weight_K, cos_TK, sin_TK, out_THK,
        x_THK.stride(0), x_THK.stride(1), out_THK.stride(0), out_THK.stride(1), cos_TK.stride(0), tokens, eps,
        size // 2, triton.next_power_of_2(size // 2), _ROTARY_TOKENS, weight_K is not None, num_warps=4,
    )  # fmt: skip


def rotary_backward(
    dy_THK: Tensor, x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor, weight_K: Tensor | None, eps: float
) -> None:
    """See `layer_maths.rotary_backward_`."""
    tokens, heads, size = x_THK.shape
    _rotary_backward[(triton.cdiv(tokens, _ROTARY_TOKENS), heads)](
        dy_THK, x_THK, x_THK if weight_K is None else weight_K, cos_TK, sin_TK,
        dy_THK.stride(0), dy_THK.stride(1), x_THK.stride(0), x_THK.stride(1), cos_TK.stride(0), tokens, eps,
        size // 2, triton.next_power_of_2(size // 2), _ROTARY_TOKENS, weight_K is not None, num_warps=4,
    )  # fmt: skip


_SWIGLU_BLOCK = 2048


def swiglu(gate_up_T2F: Tensor, out_TF: Tensor) -> None:
    """See `layer_maths.swiglu`."""
    tokens, width = out_TF.shape
    grid = (tokens, triton.cdiv(width, _SWIGLU_BLOCK))
    _swiglu[grid](gate_up_T2F, out_TF, gate_up_T2F.stride(0), out_TF.stride(0), width, _SWIGLU_BLOCK, num_warps=8)


def swiglu_backward(gate_up_T2F: Tensor, grad_TF: Tensor) -> None:
    """See `layer_maths.swiglu_backward_`."""
    tokens, width = grad_TF.shape
    grid = (tokens, triton.cdiv(width, _SWIGLU_BLOCK))
    strides = (gate_up_T2F.stride(0), grad_TF.stride(0))
    _swiglu_backward[grid](gate_up_T2F, grad_TF, *strides, width, _SWIGLU_BLOCK, num_warps=8)


def logprobs_(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """See `layer_maths.logprobs_`."""
    rows, vocabulary = logits_CV.shape
    logp_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    _logprobs[(rows,)](logits_CV, targets_C, logp_C, logits_CV.stride(0), vocabulary, 8192, num_warps=16)
    return logp_C


def nf4(parts: tuple[Tensor, ...], constants: Any, out_OI: Tensor) -> None:
    """Write a dequantised NF4 weight; see `weights.Nf4Weight`."""
    packed, absmax, *rest = parts
    nested = bool(rest)
    absmax2 = rest[0] if nested else absmax
    num_bytes, block = packed.numel(), 1024
    _nf4[(triton.cdiv(num_bytes, block),)](
        packed, constants.levels, absmax, constants.absmax_levels if nested else absmax, absmax2,
        constants.offset if nested else absmax, out_OI, out_OI.stride(0), out_OI.shape[1], num_bytes,
        constants.block_size, constants.block_size2, nested, block, num_warps=4,
    )  # fmt: skip


def gather_rows(table_VD: Tensor, ids_T: Tensor, out_TD: Tensor) -> None:
    """Copy rows of a table that may lie in page-locked host memory."""
    tokens, width = out_TD.shape
    block = min(4096, triton.next_power_of_2(width))
    _gather_rows[(tokens,)](table_VD, ids_T, out_TD, width, block, num_warps=8)
