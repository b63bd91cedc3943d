"""One update: samples in, changed weights out.

    samples ─▶ rows ─▶ for each row: forward, loss sum / denominator, backward ─▶ gradient ─▶ clip ─▶ optimizer.step()

The denominator is the sum of token weights of the *whole* update, known before the first backward and divided before
it. So the gradient is the same however samples fall into rows: a row with many trained tokens counts for many, a row
without any changes nothing. A row is a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from traceforge.models.language_model import LanguageModel
from traceforge.training.methods import AnyRow, Item, Method, Sft

SFT = Sft()


@dataclass(frozen=True)
class Update:
    """The work of one update.

    Args:
        rows: what the model runs over, one micro-batch each.
        num_samples: samples (or pairs) in them.
        denominator: what the summed loss is divided by: token weights of all samples, or the number of pairs.
        method: what the loss of a row is.
    """

    rows: tuple[AnyRow, ...]
    num_samples: int
    denominator: float
    method: Method = SFT


@dataclass(frozen=True)
class UpdateResult:
    """What an update did.

    Args:
        loss: weighted negative log-likelihood per unit of weight, in nats, before the update.
        gradient_norm: L2 norm over all trained parameters before clipping.
        skipped: the gradient was not finite and the weights were left alone.
        logged: what the method logs beside the loss, as means over pairs.
    """

    loss: float
    gradient_norm: float
    skipped: bool
    logged: Mapping[str, float] = field(default_factory=dict)


def plan_update(model: LanguageModel, items: Sequence[Item], *, tokens_per_row: int, method: Method = SFT) -> Update:
    """Return the rows and the denominator of an update of these samples or pairs."""
    rows = method.rows(model, items, tokens_per_row=tokens_per_row)
    return Update(tuple(rows), len(items), method.denominator(items), method)


def backward(model: LanguageModel, update: Update, *, scaler: torch.amp.GradScaler | None = None) -> float:
    """Add the gradient of the update's loss to every trained parameter's `.grad` and return the loss.

    With a scaler the gradient is multiplied by its scale, the returned loss is not.
    """
    return _backward(model, update, scaler)["loss"]


def _backward(model: LanguageModel, update: Update, scaler: torch.amp.GradScaler | None) -> dict[str, float]:
    """Return the loss, and what the method logs, each divided by the denominator."""
    assert update.denominator > 0, "an update without a trained token is refused earlier"
    parts: dict[str, list[Tensor]] = {"loss": []}
    for row in update.rows:
        if row.total_weight == 0:
            continue  # nothing to learn here; it would add exactly zero
        found = update.method.row_loss(model, row)
        loss = found.loss / update.denominator
        (loss if scaler is None else scaler.scale(loss)).backward()
        for name, value in (("loss", loss.detach()), *((n, v / update.denominator) for n, v in found.sums.items())):
            parts.setdefault(name, []).append(value)
    return {name: math.fsum(torch.stack(values).double().tolist()) for name, values in parts.items()}


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
    logged = _backward(model, update, scaler)
    loss = logged.pop("loss")
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = clip_gradient([parameter for _, parameter in model.trainable()], max_gradient_norm)
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if scaler is not None:
        scaler.update()
    return UpdateResult(loss, norm, skipped=not finite, logged=logged)


def clip_gradient(parameters: Sequence[nn.Parameter], max_norm: float | None) -> float:
    """Scale the gradient of all parameters together down to `max_norm` and return its norm before."""
    limit = math.inf if max_norm is None else max_norm
    return float(nn.utils.clip_grad_norm_(parameters, limit))
