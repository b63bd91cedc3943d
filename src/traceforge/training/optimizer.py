"""The optimizer and its learning rate, a pure function of the update number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from traceforge.config import OptimizerSettings, ScheduleSettings
from traceforge.errors import ConfigError
from traceforge.training.offloaded_adamw import OffloadedAdamW


def learning_rate(settings: ScheduleSettings, peak: float, *, update: int, total_updates: int) -> float:
    """Return the learning rate of update number `update` (the first is 0).

    Warm-up rises linearly and reaches `peak` at update `warmup_updates`; `linear` and `cosine` then fall and would
    reach 0 at `total_updates`, one update after the last.
    """
    warmup = settings.warmup_updates
    if update < warmup:
        return peak * (update + 1) / (warmup + 1)
    progress = (update - warmup) / max(1, total_updates - warmup)
    if settings.kind == "linear":
        return peak * max(0.0, 1.0 - progress)
    if settings.kind == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return peak


def build_optimizer(
    parameters: Sequence[tuple[str, nn.Parameter]], settings: OptimizerSettings
) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters; weight decay spares vectors (norms and biases).

    Raises:
        ConfigError: `adamw_8bit` was asked for and bitsandbytes cannot run it on these parameters' device.
    """
    matrices = [parameter for _, parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for _, parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
        if members
    ]
    options: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon}
    if settings.offload_state:
        return OffloadedAdamW(groups, **options)
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, **options)
    try:
        from bitsandbytes.optim import AdamW8bit

        _try_8bit(AdamW8bit, parameters[0][1].device)
    except (ImportError, RuntimeError, NotImplementedError, AttributeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"optimizer.name = 'adamw_8bit' does not run on {parameters[0][1].device}: {error}",
            hint="set optimizer.name = 'adamw'",
        ) from error
    return AdamW8bit(groups, **options)


def _try_8bit(optimizer_class: type, device: torch.device) -> None:
    """Make one 8-bit update of a throw-away parameter, so that an unsupported device fails now and by name."""
    probe = nn.Parameter(torch.zeros(8192, device=device))
    probe.grad = torch.ones_like(probe)
    optimizer_class([probe], lr=1e-3).step()
    if not bool((probe.abs() > 0).all()):
        raise RuntimeError("a trial update changed nothing")


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Write the learning rate of the coming update into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def num_state_entries(optimizer: torch.optim.Optimizer) -> int:
    """Return how many parameters have optimizer state: 0 before the first update, all of them after it."""
    return sum(1 for state in optimizer.state.values() if state)
