"""What a run optimises: how its samples become rows, what their loss is, and what it is divided by.

    method   an item is         denominator                  row
    sft      a sample           sum of token weights         samples that share prefixes
    simpo    a preference pair  number of pairs              whole pairs that share prefixes
    dpo      a preference pair  number of pairs              the same, with the start's log-probabilities as reference

A loss is a sum over the row; `update.py` divides it once, by the denominator of the whole update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from traceforge.config import DpoObjective, RunConfig, SftObjective, SimpoObjective
from traceforge.errors import InputError
from traceforge.models.language_model import LanguageModel
from traceforge.objectives.dpo import dpo_loss
from traceforge.objectives.nll import weighted_nll
from traceforge.objectives.simpo import simpo_loss
from traceforge.parallel.world import ONE_PROCESS, World
from traceforge.samples.branches import Branch, Pair, PairRow, build_branch_rows, build_pair_rows
from traceforge.samples.dataset import SampleSets, load_samples
from traceforge.samples.pair_loading import PairSets, load_pairs
from traceforge.samples.rows import Row
from traceforge.samples.tokens import Sample

Item = Sample | Pair
Sets = SampleSets | PairSets
AnyRow = Row | PairRow


@dataclass(frozen=True)
class RowLoss:
    """The loss of a row, a sum with a gradient, and sums of what is logged beside it, without one.

    `share` is the part of both that this rank counts, where several ranks come to the same numbers.
    """

    loss: Tensor
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    share: float = 1.0


class Method(Protocol):
    """One way of training; see the module's table. `logged` names the sums that `row_loss` gives beside the loss."""

    logged: tuple[str, ...]

    def rows(self, model: LanguageModel, items: Sequence[Any], *, tokens_per_row: int) -> Sequence[AnyRow]:
        """Return rows that hold every item once."""
        ...

    def denominator(self, items: Sequence[Any]) -> float:
        """Return what the summed loss of these items is divided by."""
        ...

    def row_loss(self, model: LanguageModel, row: Any) -> RowLoss:
        """Run the model over a row and return its summed loss."""
        ...

    def prepare(self, model: LanguageModel, items: Sequence[Any], *, tokens_per_row: int) -> None:
        """Measure what the method needs of the untrained model."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep, as JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned."""
        ...


class Sft:
    """Weighted negative log-likelihood of the trained tokens."""

    logged: tuple[str, ...] = ()

    def rows(self, model: LanguageModel, items: Sequence[Sample], *, tokens_per_row: int) -> list[Row]:
        """See `Method.rows`."""
        return model.rows(tuple(items), tokens_per_row=tokens_per_row)

    def denominator(self, items: Sequence[Sample]) -> float:
        """See `Method.denominator`."""
        return math.fsum(sample.total_weight for sample in items)

    def row_loss(self, model: LanguageModel, row: Row) -> RowLoss:
        """See `Method.row_loss`."""
        return RowLoss(weighted_nll(*model.row_logprobs(row)))

    def prepare(self, model: LanguageModel, items: Sequence[Sample], *, tokens_per_row: int) -> None:
        """Nothing is needed."""

    def state(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept."""


class _Preference:
    """What SimPO and DPO share: pairs in rows, branch scores, and what is logged of them.

    With a world of branches (`parallel.pairs = "branch_parallel"`) each of two ranks runs one side of every pair and
    tells the other its scores; the loss is formed with the other side constant, so each rank has the gradient of its
    own branch, and their sum over ranks is that of the pair.
    """

    logged: tuple[str, ...] = (
        "margin",
        "accuracy",
        "chosen_logp",
        "rejected_logp",
        "chosen_length",
        "rejected_length",
        "chosen_reward",
        "rejected_reward",
    )

    def __init__(self, world: World) -> None:
        self._world = world

    def rows(self, model: LanguageModel, items: Sequence[Pair], *, tokens_per_row: int) -> list[PairRow]:
        """See `Method.rows`."""
        share = model.layout == "tree"
        if self._world.branch_size == 2:
            return build_branch_rows(items, self._world.branch_rank, tokens_per_row=tokens_per_row, share=share)
        return build_pair_rows(items, tokens_per_row=tokens_per_row, share=share)

    def denominator(self, items: Sequence[Pair]) -> float:
        """See `Method.denominator`."""
        return float(len(items))

    def row_loss(self, model: LanguageModel, row: PairRow) -> RowLoss:
        """See `Method.row_loss`."""
        chosen, rejected = self._scores(model, row)
        loss, margin_P, rewards = self.pair_loss(row.pair_ids, chosen, rejected)
        sums = preference_sums(chosen, rejected, margin_P, rewards)
        return RowLoss(loss, sums, share=1 / self._world.branch_size)

    def _scores(self, model: LanguageModel, row: PairRow) -> tuple[Scores, Scores]:
        """Return the scores of both sides; branch-parallel, the other rank's side is a constant."""
        logp_N, _ = model.row_logprobs(row.row)
        if self._world.branch_size == 1:
            return Scores.of(logp_N, row.chosen), Scores.of(logp_N, row.rejected)
        own = Scores.of(logp_N, row.rejected if self._world.branch_rank else row.chosen)
        told = self._world.gather_scores(torch.cat([own.sum_P.detach(), own.weight_P]))
        sides = [Scores(*each.to(own.sum_P).chunk(2)) for each in told]
        sides[self._world.branch_rank] = own
        return sides[0], sides[1]

    def mean_logprobs(
        self, model: LanguageModel, items: Sequence[Pair], *, tokens_per_row: int
    ) -> dict[str, tuple[float, float]]:
        """Return the mean log-probability of the chosen and the rejected side of every pair, by pair id."""
        found = {}
        for row in self.rows(model, items, tokens_per_row=tokens_per_row):
            chosen, rejected = (side.mean_P.tolist() for side in self._scores(model, row))
            found.update({name: (a, b) for name, a, b in zip(row.pair_ids, chosen, rejected, strict=True)})
        return found

    def pair_loss(
        self, pair_ids: Sequence[str], chosen: Scores, rejected: Scores
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return the loss summed over pairs, each pair's reward margin, and the rewards of both sides."""
        raise NotImplementedError

    def prepare(self, model: LanguageModel, items: Sequence[Pair], *, tokens_per_row: int) -> None:
        """Nothing is needed unless the method says so."""

    def state(self) -> dict[str, Any]:
        """Nothing is kept unless the method says so."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing is kept unless the method says so."""


@dataclass(frozen=True)
class Scores:
    """Weighted log-probabilities of one side's branches: their sums [P], and the sums of their weights [P]."""

    sum_P: Tensor
    weight_P: Tensor

    @classmethod
    def of(cls, logp_N: Tensor, branches: Sequence[Branch]) -> Scores:
        """Return the scores of branches whose tokens are among the targets [N] of a row."""
        sums = []
        for branch in branches:
            targets_B = torch.as_tensor(branch.targets_B, device=logp_N.device)
            weights_B = torch.as_tensor(branch.weights_B, device=logp_N.device, dtype=logp_N.dtype)
            sums.append((weights_B * logp_N[targets_B]).sum())
        totals = [branch.total_weight for branch in branches]
        return cls(torch.stack(sums), torch.tensor(totals, device=logp_N.device, dtype=logp_N.dtype))

    @property
    def mean_P(self) -> Tensor:
        """Mean log-probability per unit of weight: SimPO's score."""
        return self.sum_P / self.weight_P


class Simpo(_Preference):
    """See `objectives/simpo.py`; optionally with the negative log-likelihood of the chosen side."""

    def __init__(self, settings: SimpoObjective, world: World = ONE_PROCESS) -> None:
        super().__init__(world)
        self._settings = settings

    def pair_loss(
        self, pair_ids: Sequence[str], chosen: Scores, rejected: Scores
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """See `_Preference.pair_loss`."""
        settings = self._settings
        loss, margin_P = simpo_loss(
            chosen.mean_P,
            rejected.mean_P,
            beta=settings.beta,
            gamma=settings.absolute_gamma,
            label_smoothing=settings.label_smoothing,
        )
        if settings.chosen_nll_weight:
            loss = loss - settings.chosen_nll_weight * chosen.mean_P.sum()
        return loss, margin_P, (settings.beta * chosen.mean_P, settings.beta * rejected.mean_P)


class Dpo(_Preference):
    """See `objectives/dpo.py`. The reference is the model that training started from, the initial adapter included."""

    def __init__(self, settings: DpoObjective, world: World = ONE_PROCESS) -> None:
        super().__init__(world)
        self._settings = settings
        self._reference: dict[str, tuple[float, float]] = {}

    def pair_loss(
        self, pair_ids: Sequence[str], chosen: Scores, rejected: Scores
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """See `_Preference.pair_loss`."""
        missing = [name for name in pair_ids if name not in self._reference]
        if missing:
            raise InputError(f"pair {missing[0]} has no reference log-probabilities", hint="start a new run")
        references = torch.tensor(
            [self._reference[name] for name in pair_ids], device=chosen.sum_P.device, dtype=chosen.sum_P.dtype
        )
        beta = self._settings.beta
        loss, margin_P = dpo_loss(chosen.sum_P, rejected.sum_P, references[:, 0], references[:, 1], beta=beta)
        return loss, margin_P, (beta * (chosen.sum_P - references[:, 0]), beta * (rejected.sum_P - references[:, 1]))

    def prepare(self, model: LanguageModel, items: Sequence[Pair], *, tokens_per_row: int) -> None:
        """Measure every pair under the model as it is now, unless that is already known."""
        unknown = [pair for pair in items if pair.pair_id not in self._reference]
        for row in self.rows(model, unknown, tokens_per_row=tokens_per_row) if unknown else []:
            sides = (side.sum_P.tolist() for side in self._scores(model, row))
            for name, *both in zip(row.pair_ids, *sides, strict=True):
                self._reference[name] = (both[0], both[1])

    def state(self) -> dict[str, Any]:
        """See `Method.state`."""
        return {"reference": {name: list(both) for name, both in self._reference.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Method.restore`."""
        self._reference = {name: (float(a), float(b)) for name, (a, b) in state.get("reference", {}).items()}


def preference_sums(
    chosen: Scores, rejected: Scores, margin_P: Tensor, rewards: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Return sums over pairs of what is logged; divided by the number of pairs they are means."""
    values = {
        "margin": margin_P,
        "accuracy": (margin_P > 0).to(margin_P.dtype),
        "chosen_logp": chosen.mean_P,
        "rejected_logp": rejected.mean_P,
        "chosen_length": chosen.weight_P,
        "rejected_length": rejected.weight_P,
        "chosen_reward": rewards[0],
        "rejected_reward": rewards[1],
    }
    return {name: value.detach().sum() for name, value in values.items()}


def method_of(config: RunConfig, world: World = ONE_PROCESS) -> Method:
    """Return the method that `[objective]` names."""
    match config.objective:
        case SimpoObjective() as settings:
            return Simpo(settings, world)
        case DpoObjective() as settings:
            return Dpo(settings, world)
        case SftObjective():
            return Sft()


def load_sets(config: RunConfig, tokenizer: Any) -> Sets:
    """Return what the objective trains on and measures: samples, or preference pairs."""
    load = load_samples if isinstance(config.objective, SftObjective) else load_pairs
    return load(config.data, tokenizer, template_kwargs=config.model.template_kwargs)
