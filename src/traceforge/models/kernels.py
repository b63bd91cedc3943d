"""Attention kernels: one rectangle of queries against keys, with its log-sum-exp, forward and backward.

Each kernel is a plain causal or full attention of the device, without a mask. The backward takes the output and the
log-sum-exp of the *whole* attention a query has taken part in, so that several rectangles add up to the exact gradient:
softmax weights are `exp(score - logsumexp)` and `rowsum(grad * output)` is a property of the query, not of a rectangle.

Tensors are [1, H, Q, K] for queries and [1, G, S, K] for keys and values; G divides H. The log-sum-exp is [1, H, Q] in
float32 (float64 stays).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

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


_CPU_FLASH, _CUDA_FLASH, _CUDA_EFFICIENT = CpuFlash(), CudaFlash(), CudaEfficient()


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the kernel that runs on a device in a dtype."""
    if device.type == "cpu":
        return _CPU_FLASH
    return _CUDA_FLASH if dtype in (torch.bfloat16, torch.float16) else _CUDA_EFFICIENT
