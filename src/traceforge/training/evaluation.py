"""Evaluation on fixed samples: token-weighted, and without a trace.

The loss of a set is the sum over its tokens divided once by their weight, so it does not depend on how samples fall
into rows. Modes, random generators and gradients are as before afterwards, also after an exception.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from traceforge.config import RunConfig
from traceforge.errors import EvaluationError
from traceforge.models.language_model import LanguageModel
from traceforge.parallel.world import ONE_PROCESS, World
from traceforge.training.methods import Item, Method, Sets
from traceforge.training.update import SFT, own_share

ItemT = TypeVar("ItemT", bound=Item)


@dataclass(frozen=True)
class EvaluationResult:
    """Loss of one set.

    Args:
        loss: nats per unit of token weight, or per pair; may be non-finite if the model is.
        trained_tokens: target tokens in the set.
        rows: samples or pairs in the set.
        rows_without_targets: samples of it that have no target and so do not count.
        logged: what the method logs beside the loss, as means over pairs.
    """

    loss: float
    trained_tokens: int
    rows: int
    rows_without_targets: int
    logged: Mapping[str, float] = field(default_factory=dict)


def evaluate(
    model: LanguageModel,
    items: Sequence[Item],
    *,
    tokens_per_row: int,
    method: Method = SFT,
    name: str = "evaluation",
    world: World = ONE_PROCESS,
) -> EvaluationResult:
    """Return the loss of `items`: per unit of token weight, or per pair. Each rank runs a share of them.

    Raises:
        EvaluationError: no sample of the set has a target.
    """
    measured = [item for item in items if item.num_trained_tokens]
    if not measured:
        raise EvaluationError(
            f"the {name} set has no trained token in its {len(items)} samples",
            hint="see `traceforge inspect` for what was cut or masked",
        )
    sums: dict[str, list[float]] = {key: [] for key in ("loss", *method.logged)}
    with without_trace(model.model):
        for row in method.rows(model, own_share(model, measured, world), tokens_per_row=tokens_per_row):
            found = method.row_loss(model, row)
            for key, value in (("loss", found.loss), *found.sums.items()):
                sums[key].append(float(value) * found.share)
    totals = world.sum_numbers([_sum(values) for values in sums.values()])
    denominator = method.denominator(measured)
    means = {key: total / denominator for key, total in zip(sums, totals, strict=True)}
    return EvaluationResult(
        loss=means.pop("loss"),
        trained_tokens=sum(item.num_trained_tokens for item in measured),
        rows=len(items),
        rows_without_targets=len(items) - len(measured),
        logged=means,
    )


def _sum(values: Sequence[float]) -> float:
    # fsum refuses to add infinities of both signs; what is not finite stays so.
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Evaluate inside: no dropout, no gradient. Afterwards every flag and random generator is as it was."""
    flags = [(module, module.training) for module in model.modules()]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, flag in flags:
            module.training = flag
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def fixed_part(samples: Sequence[ItemT], most: int, *, seed: int) -> tuple[ItemT, ...]:
    """Return at most `most` distinct samples or pairs, chosen by a hash of seed and sample id, in their own order."""
    unique = list({sample.sample_id: sample for sample in samples}.values())
    ranked = sorted(unique, key=lambda sample: hashlib.sha256(f"{seed}:{sample.sample_id}".encode()).digest())
    chosen = {sample.sample_id for sample in ranked[:most]}
    return tuple(sample for sample in unique if sample.sample_id in chosen)


def fixed_sets(config: RunConfig, sets: Sets) -> dict[str, tuple[Item, ...]]:
    """Return the samples of each evaluation set of a run: `train`, and `evaluation` if something is held out."""
    train_samples = [sample for source in sets.train for sample in source.samples]
    settings, seed = config.evaluation, config.data.seed
    fixed: dict[str, tuple[Item, ...]] = {"train": fixed_part(train_samples, settings.train_samples, seed=seed)}
    if sets.evaluation:
        fixed["evaluation"] = fixed_part(sets.evaluation, settings.evaluation_samples, seed=seed)
    return fixed
