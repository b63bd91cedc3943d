"""One update: samples in, changed weights out.

    samples ─▶ rows ─▶ for each row: forward, loss sum / denominator, backward ─▶ gradient ─▶ clip ─▶ optimizer.step()

The denominator is the sum of token weights of the *whole* update, known before the first backward and divided before
it. So the gradient is the same however samples fall into rows: a row with many trained tokens counts for many, a row
without any changes nothing. A row is a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from traceforge.models.language_model import LanguageModel
from traceforge.objectives.nll import weighted_nll
from traceforge.samples.rows import Row
from traceforge.samples.tokens import Sample


@dataclass(frozen=True)
class Update:
    """The work of one update.

    Args:
        rows: what the model runs over, one micro-batch each.
        num_samples: samples in them.
        denominator: sum of the token weights of all samples.
    """

    rows: tuple[Row, ...]
    num_samples: int
    denominator: float


@dataclass(frozen=True)
class UpdateResult:
    """What an update did.

    Args:
        loss: weighted negative log-likelihood per unit of weight, in nats, before the update.
        gradient_norm: L2 norm over all trained parameters before clipping.
        skipped: the gradient was not finite and the weights were left alone.
    """

    loss: float
    gradient_norm: float
    skipped: bool


def plan_update(model: LanguageModel, samples: Sequence[Sample], *, tokens_per_row: int) -> Update:
    """Return the rows and the denominator of an update."""
    rows = model.rows(tuple(samples), tokens_per_row=tokens_per_row)
    return Update(tuple(rows), len(samples), math.fsum(sample.total_weight for sample in samples))


def backward(model: LanguageModel, update: Update, *, scaler: torch.amp.GradScaler | None = None) -> float:
    """Add the gradient of the update's loss to every trained parameter's `.grad` and return the loss.

    With a scaler the gradient is multiplied by its scale, the returned loss is not.
    """
    assert update.denominator > 0, "an update without a trained token is refused earlier"
    losses = []
    for row in update.rows:
        if row.total_weight == 0:
            continue  # nothing to learn here; it would add exactly zero
        logp_N, weights_N = model.row_logprobs(row)
        loss = weighted_nll(logp_N, weights_N) / update.denominator
        (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.detach())
    return math.fsum(torch.stack(losses).double().tolist())


def apply_update(
    model: LanguageModel,
    update: Update,
    optimizer: torch.optim.Optimizer,
    *,
    max_gradient_norm: float | None,
    scaler: torch.amp.GradScaler | None = None,
) -> UpdateResult:
    """Make one update of the weights, or skip it if its loss or gradient is not finite.

    Gradients are empty before and after.
    """
    loss = backward(model, update, scaler=scaler)
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = clip_gradient([parameter for _, parameter in model.trainable()], max_gradient_norm)
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if scaler is not None:
        scaler.update()
    return UpdateResult(loss, norm, skipped=not finite)


def clip_gradient(parameters: Sequence[nn.Parameter], max_norm: float | None) -> float:
    """Scale the gradient of all parameters together down to `max_norm` and return its norm before."""
    limit = math.inf if max_norm is None else max_norm
    return float(nn.utils.clip_grad_norm_(parameters, limit))
