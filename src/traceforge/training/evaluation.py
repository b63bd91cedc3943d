"""Evaluation on fixed samples: token-weighted, and without a trace.

The loss of a set is the sum over its tokens divided once by their weight, so it does not depend on how samples fall
into rows. Modes, random generators and gradients are as before afterwards, also after an exception.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from traceforge.config import RunConfig
from traceforge.errors import EvaluationError
from traceforge.models.language_model import LanguageModel
from traceforge.objectives.nll import weighted_nll
from traceforge.samples.dataset import SampleSets
from traceforge.samples.tokens import Sample


@dataclass(frozen=True)
class EvaluationResult:
    """Loss of one set.

    Args:
        loss: nats per unit of token weight; may be non-finite if the model is.
        trained_tokens: target tokens in the set.
        rows: samples in the set.
        rows_without_targets: samples of it that have no target and so do not count.
    """

    loss: float
    trained_tokens: int
    rows: int
    rows_without_targets: int


def evaluate(
    model: LanguageModel, samples: Sequence[Sample], *, tokens_per_row: int, name: str = "evaluation"
) -> EvaluationResult:
    """Return the token-weighted loss of `samples`.

    Raises:
        EvaluationError: no sample of the set has a target.
    """
    measured = [sample for sample in samples if sample.num_trained_tokens]
    if not measured:
        raise EvaluationError(
            f"the {name} set has no trained token in its {len(samples)} samples",
            hint="see `traceforge inspect` for what was cut or masked",
        )
    losses = []
    with without_trace(model.model):
        for row in model.rows(measured, tokens_per_row=tokens_per_row):
            losses.append(float(weighted_nll(*model.row_logprobs(row))))
    return EvaluationResult(
        loss=math.fsum(losses) / math.fsum(sample.total_weight for sample in measured)
        if all(map(math.isfinite, losses))
        else math.nan,
        trained_tokens=sum(sample.num_trained_tokens for sample in measured),
        rows=len(samples),
        rows_without_targets=len(samples) - len(measured),
    )


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


def fixed_part(samples: Sequence[Sample], most: int, *, seed: int) -> tuple[Sample, ...]:
    """Return at most `most` distinct samples, chosen by a hash of seed and sample id, in their own order."""
    unique = list({sample.sample_id: sample for sample in samples}.values())
    ranked = sorted(unique, key=lambda sample: hashlib.sha256(f"{seed}:{sample.sample_id}".encode()).digest())
    chosen = {sample.sample_id for sample in ranked[:most]}
    return tuple(sample for sample in unique if sample.sample_id in chosen)


def fixed_sets(config: RunConfig, sets: SampleSets) -> dict[str, tuple[Sample, ...]]:
    """Return the samples of each evaluation set of a run: `train`, and `evaluation` if something is held out."""
    train_samples = [sample for source in sets.train for sample in source.samples]
    fixed = {"train": fixed_part(train_samples, config.evaluation.train_samples, seed=config.data.seed)}
    if sets.evaluation:
        fixed["evaluation"] = fixed_part(sets.evaluation, config.evaluation.evaluation_samples, seed=config.data.seed)
    return fixed
