"""Log-probabilities of chosen tokens from hidden states, without a [tokens x vocabulary] matrix.

The head is applied to the trained positions only, a chunk at a time. For a frozen head the forward pass also stores
d(logp)/d(hidden), so that logits are computed once whatever objective is put on top; a trained head computes them
again in the backward pass, because its own gradient needs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """What turns a hidden state into logits: `softcap * tanh(scale * (h W' + b) / softcap)`.

    Args:
        weight_VD: output embedding.
        bias_V: bias of the output layer, if it has one.
        scale: factor on the logits (1 = none).
        softcap: soft limit of the logits (None = none).
        dtype: dtype of the matmul; the softmax is float32, or float64 if this is.
    """

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None
    dtype: torch.dtype

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Return the logits [C, V] of one chunk in float32 (float64 stays)."""
        weight = self.weight_VD.to(self.dtype)
        bias = None if self.bias_V is None else self.bias_V.to(self.dtype)
        raw = torch.nn.functional.linear(hidden_CD.to(self.dtype), weight, bias)
        logits = raw.to(torch.promote_types(raw.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def token_logprobs(hidden_ND: Tensor, targets_N: Tensor, head: Head, *, chunk_tokens: int) -> Tensor:
    """Return log p(target | hidden) of each position [N] in nats, float32 or wider.

    Args:
        hidden_ND: hidden state at the parent of each target, after the final norm.
        targets_N: token id of each target.
        head: the output layer; a gradient reaches its weight and bias if these are trained.
        chunk_tokens: positions whose logits exist at one time.

    Cost: memory N x D (stored derivative) + C x V instead of N x V; no extra work for a frozen head, one more head
        matmul for a trained one.
    Identity: equal to `log_softmax(head(h))[target]` up to the order of summation (1e-6 relative in float32).
    """
    return _TokenLogprobs.apply(hidden_ND, head.weight_VD, head.bias_V, targets_N, head, chunk_tokens)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        head: Head,
        chunk_tokens: int,
    ) -> Tensor:
        ctx.head, ctx.chunk_tokens = head, chunk_tokens
        ctx.head_is_trained = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        keep = ctx.needs_input_grad[0] and not ctx.head_is_trained
        derivative_ND = torch.empty_like(hidden_ND) if keep else None
        logps = []
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for part in _chunks(hidden_ND.shape[0], chunk_tokens):
                logits_CV = head.logits(hidden_ND[part])
                target_C1 = targets_N[part, None]
                logz_C = torch.logsumexp(logits_CV, dim=-1)
                logps.append(logits_CV.gather(1, target_C1)[:, 0] - logz_C)
                if derivative_ND is not None:
                    d_raw_CV = d_logp_d_raw(logits_CV, logz_C, target_C1, head)
                    derivative_ND[part] = (d_raw_CV.to(head.dtype) @ head.weight_VD.to(head.dtype)).to(hidden_ND.dtype)
        ctx.save_for_backward(*((derivative_ND,) if keep else (hidden_ND, targets_N)))
        if logps:
            return torch.cat(logps)
        return hidden_ND.new_zeros(0, dtype=torch.promote_types(hidden_ND.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad_N.device.type, enabled=False):
            if not ctx.head_is_trained:
                (derivative_ND,) = ctx.saved_tensors
                return (derivative_ND * grad_N[:, None].to(derivative_ND.dtype), None, None, None, None, None)
            return (*_backward_through_head(ctx, grad_N), None, None, None)


def _backward_through_head(ctx: Any, grad_N: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    hidden_ND, targets_N = ctx.saved_tensors
    head: Head = ctx.head
    d_hidden_ND = torch.empty_like(hidden_ND)
    d_weight_VD = torch.zeros_like(head.weight_VD)
    d_bias_V = None if head.bias_V is None else torch.zeros_like(head.bias_V)
    for part in _chunks(hidden_ND.shape[0], ctx.chunk_tokens):
        logits_CV = head.logits(hidden_ND[part])
        logz_C = torch.logsumexp(logits_CV, dim=-1)
        d_raw_CV = d_logp_d_raw(logits_CV, logz_C, targets_N[part, None], head) * grad_N[part, None]
        narrow_CV = d_raw_CV.to(head.dtype)
        d_hidden_ND[part] = (narrow_CV @ head.weight_VD.to(head.dtype)).to(hidden_ND.dtype)
        d_weight_VD += (narrow_CV.T @ hidden_ND[part].to(head.dtype)).to(d_weight_VD.dtype)
        if d_bias_V is not None:
            d_bias_V += d_raw_CV.sum(0).to(d_bias_V.dtype)
    return d_hidden_ND, d_weight_VD, d_bias_V


def d_logp_d_raw(logits_CV: Tensor, logz_C: Tensor, target_C1: Tensor, head: Head) -> Tensor:
    """Return d(logp)/d(h W' + b) [C, V]: one-hot minus softmax, through soft cap and scale."""
    derivative_CV = torch.exp(logits_CV - logz_C[:, None]).neg_()
    derivative_CV.scatter_add_(1, target_C1, torch.ones_like(target_C1, dtype=derivative_CV.dtype))
    if head.softcap is not None:
        derivative_CV *= 1 - (logits_CV / head.softcap) ** 2
    if head.scale != 1.0:
        derivative_CV *= head.scale
    return derivative_CV


def _chunks(length: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, length)) for start in range(0, length, chunk_tokens)]
