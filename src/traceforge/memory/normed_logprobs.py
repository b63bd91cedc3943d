"""Log-probabilities read from a row's hidden states before the final norm: gather, norm, head and softmax per chunk.

What `token_logprobs` does for a frozen head, with the gather and the norm inside, so that neither a copy of the read
positions nor the norm's float32 intermediates exist for the whole row.

Cost     Memory N x D (stored derivative) + C x V instead of N x V; no extra work.
Identity `token_logprobs(norm(hidden)[positions], ...)` up to the order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from traceforge.memory.layer_maths import logprobs_, rms_norm, rms_norm_backward_
from traceforge.memory.token_logprobs import Head, d_logp_d_raw


def normed_logprobs(
    hidden_TD: Tensor,
    positions_N: Tensor,
    targets_N: Tensor,
    head: Head,
    norm: tuple[Tensor, float],
    *,
    chunk_tokens: int,
) -> Tensor:
    """Return log p(target | hidden at position) [N] in nats, float32 or wider.

    Args:
        hidden_TD: hidden states of a row after the last layer.
        positions_N: position that each target is predicted from; one position may predict several.
        targets_N: token ids.
        head: the output layer, frozen.
        norm: weight and epsilon of the final RMS norm, frozen.
        chunk_tokens: positions whose logits exist at one time.
    """
    assert not head.weight_VD.requires_grad, "a trained head takes `token_logprobs`"
    return _NormedLogprobs.apply(hidden_TD, positions_N, targets_N, head, norm, chunk_tokens)


class _NormedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        positions_N: Tensor,
        targets_N: Tensor,
        head: Head,
        norm: tuple[Tensor, float],
        chunk_tokens: int,
    ) -> Tensor:
        keeps = ctx.needs_input_grad[0]
        count = positions_N.shape[0]
        derivative_ND = hidden_TD.new_empty(count, hidden_TD.shape[1]) if keeps else None
        wide = torch.promote_types(hidden_TD.dtype, torch.float32)
        logp_N = torch.empty(count, dtype=wide, device=hidden_TD.device)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            for start in range(0, count, chunk_tokens):
                part = slice(start, start + chunk_tokens)
                read_CD = hidden_TD.index_select(0, positions_N[part])
                normed_CD = rms_norm(read_CD, *norm, torch.empty_like(read_CD))
                logp_N[part], d_normed_CD = _chunk(normed_CD, targets_N[part], head, keeps)
                if derivative_ND is not None:
                    rms_norm_backward_(d_normed_CD, read_CD, *norm, derivative_ND[part], adds=False)
        ctx.shape, ctx.chunk_tokens = hidden_TD.shape, chunk_tokens
        if derivative_ND is not None:
            ctx.save_for_backward(derivative_ND, positions_N)
        return logp_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        derivative_ND, positions_N = ctx.saved_tensors
        grad_TD = derivative_ND.new_zeros(ctx.shape)
        for start in range(0, positions_N.shape[0], ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            scaled_CD = (derivative_ND[part] * grad_N[part, None]).to(derivative_ND.dtype)
            grad_TD.index_add_(0, positions_N[part], scaled_CD)
        return grad_TD, None, None, None, None, None


def _chunk(normed_CD: Tensor, targets_C: Tensor, head: Head, keeps: bool) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [C] of a chunk and their derivative by the normed states (empty if not kept)."""
    weight = head.weight_VD.to(head.dtype)
    if head.scale == 1.0 and head.softcap is None:
        bias = None if head.bias_V is None else head.bias_V.to(head.dtype)
        raw_CV = torch.nn.functional.linear(normed_CD.to(head.dtype), weight, bias)
        logp_C = logprobs_(raw_CV, targets_C)
    else:
        logits_CV = head.logits(normed_CD)
        logz_C = torch.logsumexp(logits_CV, dim=-1)
        logp_C = logits_CV.gather(1, targets_C[:, None])[:, 0] - logz_C
        raw_CV = d_logp_d_raw(logits_CV, logz_C, targets_C[:, None], head).to(head.dtype)
    return logp_C, (raw_CV @ weight).to(normed_CD.dtype) if keeps else normed_CD.new_empty(0)
