"""What a decoder layer does between its matmuls, forward and backward, without autograd: norm, RoPE, SwiGLU, softmax.

Each function has a Triton kernel (CUDA) and plain torch (anything else). Arithmetic is float32, or float64 if the input
is; results are rounded once. Names that end in `_` overwrite an argument, so that no second buffer exists.

Cost     One pass over memory each.
Identity The same as the autograd of transformers' modules, up to rounding of the dtype (float32 1e-6).

Shape legend beside the package's: F size of the MLP, H heads, K head size, C positions of a chunk.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def _triton() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from traceforge.memory import triton_kernels

    return triton_kernels


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """Return the module of Triton kernels where it can run on this tensor, else None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return _triton() if (tensor.is_cuda or interpreted) and tensor.dtype != torch.float64 else None


def name_of_kernels(device: torch.device) -> str:
    """Return what runs these functions on a device, for the evidence."""
    return "triton" if device.type == "cuda" and _triton() is not None else "torch"


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor) -> Tensor:
    """Write `weight * x / sqrt(mean(x^2) + eps)` of each row to `out_TD` and return it."""
    if (kernels := kernels_for(x_TD)) is not None:
        kernels.rms_norm(x_TD, weight_D, eps, out_TD)
    else:
        wide = _wide(x_TD)
        out_TD.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * _wide(weight_D))
    return out_TD


def rms_norm_backward_(
    dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, into_TD: Tensor, *, adds: bool
) -> None:
    """Write the gradient of `x_TD` to `into_TD`, or add it to what stands there."""
    if (kernels := kernels_for(x_TD)) is not None:
        kernels.rms_norm_backward(dy_TD, x_TD, weight_D, eps, into_TD, adds=adds)
        return
    dx = _unit_backward(_wide(dy_TD) * _wide(weight_D), _wide(x_TD), eps)
    into_TD.copy_(_wide(into_TD) + dx if adds else dx)


def _unit_backward(grad: Tensor, x: Tensor, eps: float) -> Tensor:
    """Return the gradient of x, given that of `x / sqrt(mean(x^2) + eps)`."""
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    unit = x * scale
    return scale * (grad - unit * (grad * unit).mean(-1, keepdim=True))


def rotary(
    x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor, weight_K: Tensor | None, eps: float, out_THK: Tensor
) -> Tensor:
    """Write each head, normalised by its RMS if there is a `weight_K`, then turned by RoPE, and return it.

    Args:
        cos_TK: cosine of each position's angles; the second half of K repeats the first, as transformers makes it.
    """
    if (kernels := kernels_for(x_THK)) is not None:
        kernels.rotary(x_THK, cos_TK, sin_TK, weight_K, eps, out_THK)
        return out_THK
    x = _wide(x_THK)
    if weight_K is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * _wide(weight_K)
    out_THK.copy_(_turn(x, cos_TK, sin_TK))
    return out_THK


def rotary_backward_(
    dy_THK: Tensor, x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor, weight_K: Tensor | None, eps: float
) -> None:
    """Overwrite the input of `rotary` with its gradient."""
    if (kernels := kernels_for(x_THK)) is not None:
        kernels.rotary_backward(dy_THK, x_THK, cos_TK, sin_TK, weight_K, eps)
        return
    grad = _turn(_wide(dy_THK), cos_TK, -sin_TK)
    x_THK.copy_(grad if weight_K is None else _unit_backward(grad * _wide(weight_K), _wide(x_THK), eps))


def _turn(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    low, high = x_THK.chunk(2, dim=-1)
    cos, sin = (_wide(each)[:, None, : low.shape[-1]] for each in (cos_TK, sin_TK))
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def swiglu(gate_up_T2F: Tensor, out_TF: Tensor) -> Tensor:
    """Write `silu(gate) * up` to `out_TF` and return it; gate is the first half of `gate_up_T2F`."""
    if (kernels := kernels_for(gate_up_T2F)) is not None:
        kernels.swiglu(gate_up_T2F, out_TF)
    else:
        gate, up = _wide(gate_up_T2F).chunk(2, dim=-1)
        out_TF.copy_(gate * torch.sigmoid(gate) * up)
    return out_TF


def swiglu_backward_(gate_up_T2F: Tensor, grad_TF: Tensor) -> None:
    """Overwrite gate and up with their gradients, and the gradient of `silu(gate) * up` with its value."""
    if (kernels := kernels_for(gate_up_T2F)) is not None:
        kernels.swiglu_backward(gate_up_T2F, grad_TF)
        return
    gate, up = _wide(gate_up_T2F).chunk(2, dim=-1)
    grad = _wide(grad_TF)
    gating = torch.sigmoid(gate)
    active = gate * gating
    value = active * up
    gate_up_T2F.copy_(torch.cat([grad * up * (gating + active * (1 - gating)), grad * active], dim=-1))
    grad_TF.copy_(value)


def logprobs_(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Return `log_softmax(logits)[target]` [C] and overwrite the logits with its derivative by them."""
    if (kernels := kernels_for(logits_CV)) is not None:
        logp_C: Tensor = kernels.logprobs_(logits_CV, targets_C)
        return logp_C
    wide = _wide(logits_CV)
    target_C1 = targets_C[:, None]
    logz_C1 = torch.logsumexp(wide, dim=-1, keepdim=True)
    found_C: Tensor = (wide.gather(1, target_C1) - logz_C1)[:, 0]
    derivative = torch.exp(wide - logz_C1).neg_()
    derivative.scatter_add_(1, target_C1, torch.ones_like(target_C1, dtype=derivative.dtype))
    logits_CV.copy_(derivative)
    return found_C
