"""What the process holds: bytes by part, peaks, and which tensors changed."""

from __future__ import annotations

import hashlib
import resource
import sys
from collections.abc import Sequence

import torch
from torch import nn

from traceforge.models.language_model import LanguageModel

_LARGE_BYTES = 100 * 10**6


def memory_parts(model: LanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes of base weights, trained weights, their gradients (float32) and optimizer state.

    On the lean path what has moved to page-locked host memory stands apart, as `host_pinned`.
    """
    trained = {id(parameter) for _, parameter in model.trainable()}
    parts = {"base_weights": 0, "trained_weights": 0, "gradients": 0, "optimizer": 0}
    for tensor in [*model.model.parameters(), *model.model.buffers()]:
        size = tensor.numel() * tensor.element_size()
        if id(tensor) in trained:
            parts["trained_weights"] += size
            parts["gradients"] += size
        else:
            parts["base_weights"] += size
    for state in optimizer.state.values():
        parts["optimizer"] += sum(
            value.numel() * value.element_size() for value in state.values() if isinstance(value, torch.Tensor)
        )
    if (pinned := model.host_pinned_bytes()) is not None:
        parts["host_pinned"] = pinned
    return parts


def wide_frozen_weights(model: LanguageModel) -> list[str]:
    """Return the names of large frozen weights that are held in float32 though the arithmetic is 16-bit.

    Libraries that prepare a model for 4-bit training upcast embedding, output layer and norms, which costs gigabytes
    for large vocabularies; nothing here does.
    """
    if model.dtype not in (torch.bfloat16, torch.float16):
        return []
    return [
        name
        for name, parameter in model.model.named_parameters()
        if not parameter.requires_grad
        and parameter.dtype == torch.float32
        and parameter.numel() * parameter.element_size() > _LARGE_BYTES
    ]


def peak_host_bytes() -> int:
    """Return the largest resident size that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes(device: torch.device) -> tuple[int | None, int | None]:
    """Return the peak allocated and reserved bytes of a CUDA device; None on the CPU."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def fingerprints(parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[str, bytes]:
    """Return a digest of the bytes of each parameter, so that a change can be told without keeping a copy."""
    return {name: _digest(parameter) for name, parameter in parameters}


def _digest(parameter: nn.Parameter) -> bytes:
    flat = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(memoryview(flat.numpy()), digest_size=16).digest()
