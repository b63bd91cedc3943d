"""What any trainer leaves behind, in one shape: losses, learning rates, norms and the trained weights per update."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from traceforge.config import OptimizerSettings, ScheduleSettings
from traceforge.errors import UsageError
from traceforge.oracles.watch import RunWatch, Weights
from traceforge.samples.tokens import Sample

LOGGED = ("chosen_logp", "rejected_logp", "chosen_reward", "rejected_reward", "margin", "accuracy")
"""What is compared of preference pairs beside their loss, under the names of `updates.jsonl`."""

_PACKAGES = ("accelerate", "peft", "torch", "transformers", "trl")


@dataclass(frozen=True)
class TrainingTrace:
    """One training run, update by update.

    Args:
        framework: `traceforge`, `trl` or `accelerate`.
        path: dotted name of what made the updates.
        losses: loss of each update in nats, before it: token-weighted, or the mean over preference pairs.
        learning_rates: learning rate that each update used.
        gradient_norms: L2 norm of each update's gradient before clipping.
        samples_per_update: samples (or pairs) in each update.
        early_changes: micro-batches inside an update that did not end it and yet found changed weights.
        scheduler_count: how often the schedule moved on.
        weights_before: trained weights by name, before the first update.
        weights_after: the same after each update.
        first_gradient: gradient that the optimizer was given in the first update, after clipping, by name.
        seconds: what each update took, without the watching.
        peak_bytes: largest growth of memory since the first update began; None if the system does not tell.
        logged: for preference pairs, means over the pairs of each update: `LOGGED`.
    """

    framework: str
    path: str
    losses: tuple[float, ...]
    learning_rates: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    samples_per_update: tuple[int, ...]
    early_changes: int
    scheduler_count: int
    weights_before: Weights
    weights_after: tuple[Weights, ...]
    first_gradient: Weights
    seconds: tuple[float, ...]
    peak_bytes: int | None
    logged: tuple[Mapping[str, float], ...] = ()

    @property
    def num_updates(self) -> int:
        """Updates that were made."""
        return len(self.weights_after)

    @classmethod
    def of(cls, watch: RunWatch, **figures: Any) -> TrainingTrace:
        """Return the trace of a watched run; `figures` are the fields that the watch does not know."""
        return cls(
            early_changes=watch.early_changes,
            weights_before=watch.before,
            weights_after=tuple(watch.after),
            first_gradient=watch.first_gradient,
            seconds=tuple(watch.seconds),
            peak_bytes=watch.peak_bytes(),
            **figures,
        )


def network_for_oracle(network: nn.Module) -> nn.Module:
    """Return a copy of `network` that runs as its library made it: SDPA attention and the classes' own forward.

    Cost: the bytes of the network.

    Raises:
        UsageError: the network has dropout, which two trainers never draw alike, or is not in float32 or float64.
    """
    for name, module in network.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise UsageError(
                f"{name} has dropout {module.p}: two trainers never draw the same one",
                hint="compare with adapter.dropout = 0 and a model without dropout",
            )
    narrow = {str(each.dtype) for each in network.parameters() if each.dtype not in (torch.float32, torch.float64)}
    if narrow:
        raise UsageError(
            f"the comparison needs float32 weights, found {', '.join(sorted(narrow))}: rounding would hide errors",
            hint="compare with model.dtype = 'float32' and model.quantization = 'none'",
        )
    fresh = copy.deepcopy(network)
    for module in fresh.modules():
        # A wrapped forward (recompute) is a closure over the layer it was made for: the copy would run the original.
        module.__dict__.pop("forward", None)
    _base(fresh).set_attn_implementation("sdpa")
    return fresh


def check_samples(samples: Sequence[Sample]) -> None:
    """Refuse what labels, which are on or off, cannot say.

    Raises:
        UsageError: a token weight other than 0 and 1, or a sample with nothing trained.
    """
    for sample in samples:
        other = set(np.unique(sample.weights_S).tolist()) - {0.0, 1.0}
        if other:
            raise UsageError(
                f"sample {sample.sample_id} has the token weight {min(other):g}; labels are either on or off",
                hint="compare samples whose weights are 0 and 1",
            )
        if not sample.num_trained_tokens:
            raise UsageError(f"sample {sample.sample_id} has no trained token", hint="leave it out of the comparison")


def check_settings(optimizer: OptimizerSettings, schedule: ScheduleSettings) -> None:
    """Refuse settings that the standard trainers have no word for.

    Raises:
        UsageError: an 8-bit optimizer, or warm-up.
    """
    if optimizer.name != "adamw":
        raise UsageError(
            f"optimizer.name = {optimizer.name!r} rounds its moments: small differences grow",
            hint="compare with optimizer.name = 'adamw'",
        )
    if schedule.warmup_updates:
        raise UsageError(
            "schedule.warmup_updates: the standard schedules start warm-up at a learning rate of 0, this one does not",
            hint="compare with schedule.warmup_updates = 0",
        )


def labels(sample: Sample) -> list[int]:
    """Return the sample's labels as the standard trainers want them: the token id where trained, else -100."""
    return [int(i) if w else -100 for i, w in zip(sample.token_ids_S, sample.weights_S, strict=True)]


def require(library: str) -> ModuleType:
    """Return an oracle's library.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the comparison needs {error.name}, which is not installed",
            hint="pip install 'traceforge-train[oracle]'",
        ) from error


@contextmanager
def alone() -> Iterator[None]:
    """Run an oracle so that the process is as it was afterwards: random generators and Accelerate's global state."""
    from accelerate.state import AcceleratorState, GradientState

    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def versions() -> dict[str, str]:
    """Return the version of every library that takes part, `missing` if it is not installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def _base(network: nn.Module) -> Any:
    get_base = getattr(network, "get_base_model", None)
    return get_base() if get_base is not None else network
