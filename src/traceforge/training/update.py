"""One update: samples in, changed weights out.

    samples ─▶ this rank's share ─▶ rows ─▶ for each row: forward, loss sum / denominator, backward
            ─▶ gradient ─▶ sum over the ranks ─▶ clip ─▶ optimizer.step()

The denominator is the sum of token weights of the *whole* update, known before the first backward and divided before
it. So the gradient is the same however samples fall into rows: a row with many trained tokens counts for many, a row
without any changes nothing. A row is a micro-batch. Nor does it matter which rank runs a row: gradients and losses are
sums, and are summed over the ranks; a rank without a row takes part with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from traceforge.models.language_model import LanguageModel
from traceforge.parallel.world import ONE_PROCESS, World
from traceforge.samples.balance import attention_cost_of, shares
from traceforge.training.methods import AnyRow, Item, Method, Sft

SFT = Sft()


@dataclass(frozen=True)
class Update:
    """The work of one update.

    Args:
        rows: what the model runs over on this rank, one micro-batch each.
        num_samples: samples (or pairs) of the update, on all ranks.
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


def plan_update(
    model: LanguageModel,
    items: Sequence[Item],
    *,
    tokens_per_row: int,
    method: Method = SFT,
    world: World = ONE_PROCESS,
) -> Update:
    """Return this rank's rows of an update of these samples or pairs, and the denominator of the whole."""
    rows = method.rows(model, own_share(model, items, world), tokens_per_row=tokens_per_row)
    return Update(tuple(rows), len(items), method.denominator(items), method)


def own_share(model: LanguageModel, items: Sequence[Item], world: World) -> list[Item]:
    """Return the samples or pairs that this rank runs; every rank comes to the same shares."""
    if world.data_size == 1:
        return list(items)
    cost = attention_cost_of(model.base.config.hidden_size)
    return shares(items, world.data_size, attention_cost=cost, share=model.layout == "tree")[world.data_rank]


def backward(model: LanguageModel, update: Update, *, scaler: torch.amp.GradScaler | None = None) -> float:
    """Add the gradient of the update's loss to every trained parameter's `.grad` and return the loss.

    With a scaler the gradient is multiplied by its scale, the returned loss is not.
    """
    return _backward(model, update, scaler)["loss"]


def _backward(model: LanguageModel, update: Update, scaler: torch.amp.GradScaler | None) -> dict[str, float]:
    """Return this rank's part of the loss and of what the method logs, each divided by the denominator."""
    assert update.denominator > 0, "an update without a trained token is refused earlier"
    parts: dict[str, list[Tensor]] = {name: [] for name in ("loss", *update.method.logged)}
    for row in update.rows:
        if row.total_weight == 0:
            continue  # nothing to learn here; it would add exactly zero
        found = update.method.row_loss(model, row)
        loss = found.loss / update.denominator
        (loss if scaler is None else scaler.scale(loss)).backward()
        for name, value in (("loss", loss.detach()), *((n, v / update.denominator) for n, v in found.sums.items())):
            parts[name].append(value * found.share)
    return {name: math.fsum(torch.stack(values).double().tolist()) if values else 0.0 for name, values in parts.items()}


def apply_update(
    model: LanguageModel,
    update: Update,
    optimizer: torch.optim.Optimizer,
    *,
    max_gradient_norm: float | None,
    scaler: torch.amp.GradScaler | None = None,
    world: World = ONE_PROCESS,
) -> UpdateResult:
    """Make one update of the weights, or skip it if its loss or gradient is not finite: alike on every rank.

    Gradients are empty before and after.

    Raises:
        DisagreementError: the ranks' weights differ afterwards.
        RankError: another rank ended, or does something else.
    """
    parameters = [parameter for _, parameter in model.trainable()]
    if scaler is not None:
        scaler.scale(torch.zeros((), device=parameters[0].device))  # a rank without a row needs the scale too
    own = _backward(model, update, scaler)
    world.sum_gradients(parameters)
    logged = dict(zip(own, world.sum_numbers(list(own.values())), strict=True))
    loss = logged.pop("loss")
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = clip_gradient(parameters, max_gradient_norm)
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        optimizer.step()
        world.agree(parameters)
    optimizer.zero_grad(set_to_none=True)
    if scaler is not None:
        scaler.update()
    return UpdateResult(loss, norm, skipped=not finite, logged=logged)


def clip_gradient(parameters: Sequence[nn.Parameter], max_norm: float | None) -> float:
    """Scale the gradient of all parameters together down to `max_norm` and return its norm before."""
    limit = math.inf if max_norm is None else max_norm
    return float(nn.utils.clip_grad_norm_(parameters, limit))
