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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
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

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
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


def kernel_for(device: torch.device) -> Kernel:
    """Return the kernel of a device."""
    assert device.type == "cpu"
    return CpuFlash()
