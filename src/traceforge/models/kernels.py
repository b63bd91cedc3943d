"""Attention kernels: one rectangle of queries against keys, with its log-sum-exp, forward and backward.

Each kernel is a plain causal or full attention of the device, without a mask. The backward takes the output and the
log-sum-exp of the *whole* attention a query has taken part in, so that several rectangles add up to the exact gradient:
softmax weights are `exp(score - logsumexp)` and `rowsum(grad * output)` is a property of the query, not of a rectangle.

Tensors are [1, H, Q, K] for queries and [1, G, S, K] for keys and values; G divides H. The log-sum-exp is [1, H, Q] in
float32 (float64 stays).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from traceforge.samples.rows import Piece

_aten = torch.ops.aten


class Kernel(Protocol):
    """What runs one rectangle; `name` is what the evidence shows."""

    name: str

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output [1, H, Q, K] and the log-sum-exp [1, H, Q] of this rectangle alone."""
        ...

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        logsumexp: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rectangle's part of the gradient of query, key and value."""
        ...


class CpuFlash:
    """torch's tiled CPU attention: no [Q x S] buffer."""

    name = "cpu_flash"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        output, logsumexp = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return output, logsumexp

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        logsumexp: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *inputs, output, logsumexp, 0.0, causal, scale=scale
        )
        return grads


class CudaFlash:
    """FlashAttention-2 as torch ships it: bfloat16 and float16, grouped heads, any lengths without a start-up cost."""

    name = "cuda_flash"

    def __init__(self) -> None:
        self._philox: tuple[Tensor, Tensor] | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        output, logsumexp, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        self._philox = (seed, offset)  # no dropout: the generator's state is passed through and not used
        return output, logsumexp

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        logsumexp: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        assert self._philox is not None, "a forward pass comes first"
        query, key, value = inputs
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, output, logsumexp.contiguous(), None, None, query.shape[2], key.shape[2],
            0.0, causal, *self._philox, scale=scale,
        )  # fmt: skip
        return grads


class Cudnn:
    """cuDNN's fused attention: the fastest on recent cards, but each new length costs a plan (0.1 s and more).

    `assign_kernels` therefore gives it lengths that are multiples of a bucket and leaves the rests to `CudaFlash`.
    """

    name = "cudnn"

    def __init__(self) -> None:
        self._philox: tuple[Tensor, Tensor] | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        output, logsumexp, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        self._philox = (seed, offset)
        return output, logsumexp.reshape(query.shape[:-1])

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        logsumexp: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        assert self._philox is not None, "a forward pass comes first"
        query, key, value = inputs
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, output, logsumexp.contiguous()[..., None], *self._philox, None, None, None,
            query.shape[2], key.shape[2], 0.0, causal, scale=scale,
        )  # fmt: skip
        return grads


class CudaEfficient:
    """torch's memory-efficient attention, for float32 on CUDA; key and value heads are repeated for it."""

    name = "cuda_efficient"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        key, value = (_repeat_heads(each, query.shape[1]) for each in (key, value))
        output, logsumexp, seed, offset = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        self._philox = (seed, offset)
        return output, logsumexp[:, :, : query.shape[2]]  # its buffer is padded to a multiple of 32

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        output: Tensor,
        logsumexp: Tensor,
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        query, key, value = inputs
        wide_key, wide_value = (_repeat_heads(each, query.shape[1]) for each in (key, value))
        padded = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[2] % 32), value=torch.inf)
        d_query, d_key, d_value, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad, query, wide_key, wide_value, None, output, padded, *self._philox, 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        return d_query, _sum_heads(d_key, key.shape[1]), _sum_heads(d_value, value.shape[1])


def _repeat_heads(tensor_1GSK: Tensor, num_heads: int) -> Tensor:
    return tensor_1GSK.repeat_interleave(num_heads // tensor_1GSK.shape[1], dim=1)


def _sum_heads(tensor_1HSK: Tensor, num_groups: int) -> Tensor:
    return tensor_1HSK.unflatten(1, (num_groups, -1)).sum(2)


_CPU_FLASH, _CUDA_FLASH, _CUDA_EFFICIENT, _CUDNN = CpuFlash(), CudaFlash(), CudaEfficient(), Cudnn()
_KEY_BUCKET, _QUERY_BUCKET = 1024, 256


class Task(NamedTuple):
    """A rectangle and the kernel that runs it."""

    piece: Piece
    kernel: Kernel


def assign_kernels(
    pieces: Sequence[Piece], device: torch.device, dtype: torch.dtype, head_size: int
) -> tuple[Task, ...]:
    """Return the rectangles of a row with the kernel of each.

    Where cuDNN runs and is the fastest, a large rectangle is cut: its part of bucketed length goes to cuDNN, the rests
    to flash. The rectangles still cover the same queries and keys once, and each query's causal part still comes first.
    """
    if device.type == "cpu":
        return tuple(Task(piece, _CPU_FLASH) for piece in pieces)
    if dtype not in (torch.bfloat16, torch.float16):
        return tuple(Task(piece, _CUDA_EFFICIENT) for piece in pieces)
    if not cudnn_is_fastest(device, dtype, head_size):
        return tuple(Task(piece, _CUDA_FLASH) for piece in pieces)
    tasks = [task for piece in pieces for task in _cut_for_cudnn(piece)]
    return tuple(sorted(tasks, key=lambda task: not task.piece.causal))


def _cut_for_cudnn(piece: Piece) -> list[Task]:
    queries, keys = piece.query_stop - piece.query_start, piece.key_stop - piece.key_start
    key_stop = piece.key_start + keys // _KEY_BUCKET * _KEY_BUCKET
    if keys < 4 * _KEY_BUCKET or queries < 2 * _QUERY_BUCKET:
        return [Task(piece, _CUDA_FLASH)]
    if piece.causal:  # the triangle up to the bucket, the small triangle behind it, and the rectangle below both
        parts = [
            Task(Piece(piece.query_start, key_stop, piece.key_start, key_stop, True), _CUDNN),
            Task(Piece(key_stop, piece.query_stop, key_stop, piece.key_stop, True), _CUDA_FLASH),
            Task(Piece(key_stop, piece.query_stop, piece.key_start, key_stop, False), _CUDA_FLASH),
        ]
    else:
        query_stop = piece.query_start + queries // _QUERY_BUCKET * _QUERY_BUCKET
        parts = [
            Task(Piece(piece.query_start, query_stop, piece.key_start, key_stop, False), _CUDNN),
            Task(Piece(piece.query_start, query_stop, key_stop, piece.key_stop, False), _CUDA_FLASH),
            Task(Piece(query_stop, piece.query_stop, piece.key_start, piece.key_stop, False), _CUDA_FLASH),
        ]
    return [
        each
        for each in parts
        if each.piece.query_start < each.piece.query_stop and each.piece.key_start < each.piece.key_stop
    ]


_TRIAL_TOKENS, _TRIAL_REPEATS = 8192, 3


@cache
def cudnn_is_fastest(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether cuDNN's attention runs here, is right, and beats flash attention in a short start-up trial.

    Cost: under a second, once a process.
    """
    if not cudnn_works(device, dtype, head_size):
        return False
    return trial_s(_CUDNN, device, dtype, head_size) < trial_s(_CUDA_FLASH, device, dtype, head_size)


def trial_s(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_size: int) -> float:
    """Return the seconds of one forward and backward of a kernel over a causal row of eight heads on two."""
    query, key, value, grad = (
        torch.randn(1, heads, _TRIAL_TOKENS, head_size, device=device, dtype=dtype) for heads in (8, 2, 2, 8)
    )
    started = 0.0
    for repeat in range(_TRIAL_REPEATS + 1):
        if repeat == 1:  # the first one plans
            torch.cuda.synchronize(device)
            started = time.perf_counter()
        output, lse = kernel.forward(query, key, value, causal=True, scale=head_size**-0.5)
        kernel.backward(grad, (query, key, value), output, lse, causal=True, scale=head_size**-0.5)
    torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / _TRIAL_REPEATS


@cache
def cudnn_works(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return whether cuDNN's attention runs on this card, forward and backward, and is right on a small input."""
    generator = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, heads, 256, head_size, device=device, dtype=dtype, generator=generator) for heads in (4, 2, 2, 4)
    )
    try:
        results = []
        for kernel in (_CUDNN, _CUDA_FLASH):
            output, lse = kernel.forward(query, key, value, causal=True, scale=head_size**-0.5)
            grads = kernel.backward(grad, (query, key, value), output, lse, causal=True, scale=head_size**-0.5)
            results.append((output, lse, *grads))
    except RuntimeError:
        return False
    return all(
        bool((one.float() - other.float()).norm() <= 2e-2 * other.float().norm())
        for one, other in zip(*results, strict=True)
    )
