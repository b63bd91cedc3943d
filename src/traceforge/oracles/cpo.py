"""The same pairs through TRL's `CPOTrainer` with `loss_type="simpo"`.

Rows          One pair: token ids and labels of both sides as they are. CPOTrainer would apply a chat template, tokenise
              again, add bos and eos and cut; here its `map` over the rows changes nothing. It runs both sides as one
              padded batch of two with a mask.
Update        `gradient_accumulation_steps` pairs, one a micro-batch. Where updates differ in size the shorter ones are
              filled up with pairs of two tokens whose loss counts for nothing, and the others' loss is scaled up to
              what the trainer will divide it by.
Settings      beta, label_smoothing = ours; simpo_gamma = the absolute gamma; cpo_alpha = chosen_nll_weight (0 unless
              set; CPO's own default is 1).
One sequence  An ending of several turns whose sequences continue one another is run as the last of them, trained where
              any of them is. Where they fork (a template that drops old reasoning), CPO has no word for it: refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from traceforge.config import OptimizerSettings, ScheduleSettings, SimpoObjective
from traceforge.errors import UsageError
from traceforge.oracles.trace import (
    LOGGED,
    TrainingTrace,
    alone,
    check_samples,
    check_settings,
    labels,
    network_for_oracle,
    require,
)
from traceforge.oracles.trainer import (
    filling_rows,
    follower,
    on_one_device,
    padding_tokenizer,
    quietly,
    trainer_settings,
    update_lines,
)
from traceforge.oracles.watch import RunWatch
from traceforge.samples.branches import Pair
from traceforge.samples.tokens import Sample

PATH = "trl.experimental.cpo.CPOTrainer.train"

_NAMES = dict(
    zip(
        (
            "logps/chosen",
            "logps/rejected",
            "rewards/chosen",
            "rewards/rejected",
            "rewards/margins",
            "rewards/accuracies",
        ),
        LOGGED,
        strict=True,
    )
)


def trl_simpo(
    network: nn.Module,
    updates: Sequence[Sequence[Pair]],
    *,
    objective: SimpoObjective,
    optimizer: OptimizerSettings,
    schedule: ScheduleSettings,
) -> TrainingTrace:
    """Return what training a copy of `network` with TRL's `CPOTrainer` does, with log-probabilities and rewards.

    Args:
        network: Hugging Face model, with its adapter if it has one; its trained parameters are trained.
        updates: the pairs of each update, in order.
        objective: SimPO's settings.
        optimizer: AdamW's settings.
        schedule: without warm-up.

    Raises:
        UsageError: trl is missing, or see `check_pairs`, `check_settings` and `network_for_oracle`.
    """
    require("trl")
    require("datasets")
    if not updates or not all(updates):
        raise UsageError("every update needs at least one pair")
    for pairs in updates:
        check_pairs(pairs)
    check_settings(optimizer, schedule)
    trained = network_for_oracle(network)
    with alone(), quietly(), tempfile.TemporaryDirectory(prefix="traceforge-cpo-") as folder:
        return _train(trained, updates, objective, (optimizer, schedule), folder)


def check_pairs(pairs: Sequence[Pair]) -> None:
    """Refuse pairs that CPOTrainer has no word for.

    Raises:
        UsageError: the sequences of a side fork from one another, a token weight other than 0 and 1 or a token that
            counts twice, or a side with nothing trained.
    """
    for pair in pairs:
        for side, samples in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            whole = one_sequence(samples)
            if whole is None:
                raise UsageError(
                    f"pair {pair.pair_id}: the {len(samples)} sequences of its {side} side fork from one another (an "
                    "ending of several turns under a template that drops old reasoning); CPOTrainer holds one sequence "
                    "a side",
                    hint="compare pairs whose endings are one turn each; tests/equivalence proves the others against "
                    "plain torch",
                )
            check_samples([whole])


def one_sequence(samples: Sequence[Sample]) -> Sample | None:
    """Return the sequences of a side as one if each is a beginning of the longest, its weights their sum; else None."""
    longest = max(samples, key=lambda sample: sample.num_tokens)
    weights_S = np.zeros(longest.num_tokens)
    for sample in samples:
        if not np.array_equal(sample.token_ids_S, longest.token_ids_S[: sample.num_tokens]):
            return None
        weights_S[: sample.num_tokens] += sample.weights_S
    return replace(longest, weights_S=weights_S)


def cpo_trainer(
    network: nn.Module,
    updates: Sequence[Sequence[Pair]],
    objective: SimpoObjective,
    settings: tuple[OptimizerSettings, ScheduleSettings],
    *,
    folder: str,
    callback: Any,
) -> Any:
    """Return TRL's `CPOTrainer`, ready to train `network` itself on exactly these updates.

    Its `logged_pairs` fills with what it logs of each real pair.

    Args:
        network: see `trl_simpo`; not copied.
        updates: the pairs of each update, in order, as `check_pairs` lets them pass.
        objective: SimPO's settings.
        settings: AdamW's, and a schedule without warm-up.
        folder: where the trainer may write; it writes nothing.
        callback: a `TrainerCallback` that follows the run.
    """
    from transformers import PrinterCallback
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    class GivenTokensTrainer(CPOTrainer):
        logged_pairs: list[dict[str, float]]

        def _send_telemetry(self) -> None:
            """Send nothing: no network unless asked."""

        def get_batch_loss_metrics(self, model: Any, batch: dict[str, Any], train_eval: Any = "train") -> Any:
            """Return the loss of one pair, scaled by its row's share, and note what is logged of a real pair."""
            loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
            (share,) = batch["share"]
            if share:
                self.logged_pairs.append({ours: float(metrics[theirs]) for theirs, ours in _NAMES.items()})
            return loss * share, metrics

    rows_per_update = max(len(pairs) for pairs in updates)
    arguments = CPOConfig(
        **trainer_settings(network, *settings, rows_per_update=rows_per_update, folder=folder),
        loss_type="simpo",
        beta=objective.beta,
        simpo_gamma=objective.absolute_gamma,
        label_smoothing=objective.label_smoothing,
        cpo_alpha=objective.chosen_nll_weight,
        max_length=max(sample.num_tokens for pairs in updates for pair in pairs for sample in pair.samples),
        remove_unused_columns=False,
    )
    trainer = GivenTokensTrainer(
        model=network,
        args=on_one_device(arguments),
        train_dataset=_GivenRows(_rows(updates)),
        processing_class=padding_tokenizer(),
        callbacks=[callback],
    )
    trainer.logged_pairs = []
    trainer.remove_callback(PrinterCallback)
    return trainer


class _GivenRows:
    """Rows as they are: what CPOTrainer maps over its data set (template, tokens, eos, cut) is not done."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self._rows[place]

    def map(self, *arguments: Any, **keywords: Any) -> _GivenRows:
        """Return the rows unchanged."""
        return self


def _train(
    network: nn.Module,
    updates: Sequence[Sequence[Pair]],
    objective: SimpoObjective,
    settings: tuple[OptimizerSettings, ScheduleSettings],
    folder: str,
) -> TrainingTrace:
    watch = RunWatch(network)
    notes = follower(watch)
    trainer = cpo_trainer(network, updates, objective, settings, folder=folder, callback=notes)
    trainer.train()
    lines = update_lines(trainer)
    sizes = [rows - filled for rows, filled in zip(notes.rows_per_update, filling_rows(updates), strict=True)]
    return TrainingTrace.of(
        watch,
        framework="trl",
        path=PATH,
        losses=tuple(float(line["loss"]) for line in lines),
        learning_rates=tuple(notes.learning_rates),
        gradient_norms=tuple(float(line["grad_norm"]) for line in lines),
        samples_per_update=tuple(sizes),
        scheduler_count=int(trainer.lr_scheduler.last_epoch),
        logged=_means(trainer.logged_pairs, sizes),
    )


def _means(logged_pairs: Sequence[dict[str, float]], sizes: Sequence[int]) -> tuple[dict[str, float], ...]:
    """Return the mean of each figure over the pairs of each update."""
    remaining = iter(logged_pairs)
    updates = [[next(remaining) for _ in range(size)] for size in sizes]
    assert next(remaining, None) is None, "every pair belongs to an update"
    return tuple({name: sum(pair[name] for pair in pairs) / len(pairs) for name in LOGGED} for pairs in updates)


def _rows(updates: Sequence[Sequence[Pair]]) -> list[dict[str, Any]]:
    """Return the rows in order, with the filling ones behind those of their update."""
    rows: list[dict[str, Any]] = []
    for pairs, filled in zip(updates, filling_rows(updates), strict=True):
        share = (len(pairs) + filled) / len(pairs)
        rows += [_row(pair, share) for pair in pairs]
        rows += [_filling_row(pairs[0])] * filled
    return rows


def _row(pair: Pair, share: float) -> dict[str, Any]:
    row: dict[str, Any] = {"share": share}
    for side, samples in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        sample = one_sequence(samples)
        assert sample is not None, "checked before"
        row[f"{side}_input_ids"] = sample.token_ids_S.tolist()
        row[f"{side}_attention_mask"] = [1] * sample.num_tokens
        row[f"{side}_labels"] = labels(sample)
    return row


def _filling_row(pair: Pair) -> dict[str, Any]:
    """Return a pair of two tokens a side whose loss counts for nothing."""
    ids = pair.chosen[0].token_ids_S[:2].tolist()
    side = {"input_ids": ids, "attention_mask": [1, 1], "labels": [-100, ids[1]]}
    return {"share": 0.0} | {f"{name}_{key}": value for name in ("chosen", "rejected") for key, value in side.items()}
