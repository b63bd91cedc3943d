"""The same tokens and masks through TRL's `SFTTrainer`.

Rows          `input_ids` and `labels`, already tokenised; TRL prepares, truncates and packs nothing. A row that fills a
              shorter update up has no label.
Overridden    `max_length` 1024 and packing; see `trainer.py` for the rest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from torch import nn

from traceforge.config import OptimizerSettings, ScheduleSettings
from traceforge.errors import UsageError
from traceforge.oracles.trace import (
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
from traceforge.samples.tokens import Sample

PATH = "trl.SFTTrainer.train"


def trl_sft(
    network: nn.Module,
    updates: Sequence[Sequence[Sample]],
    *,
    optimizer: OptimizerSettings,
    schedule: ScheduleSettings,
) -> TrainingTrace:
    """Return what training a copy of `network` with TRL's `SFTTrainer` does.

    Args:
        network: Hugging Face model, with its adapter if it has one; its trained parameters are trained.
        updates: the samples of each update, in order.
        optimizer: AdamW's settings.
        schedule: without warm-up.

    Raises:
        UsageError: trl is missing, or see `check_samples`, `check_settings` and `network_for_oracle`.
    """
    require("trl")
    require("datasets")
    if not updates or not all(updates):
        raise UsageError("every update needs at least one sample")
    check_samples([sample for samples in updates for sample in samples])
    check_settings(optimizer, schedule)
    trained = network_for_oracle(network)
    with alone(), quietly(), tempfile.TemporaryDirectory(prefix="traceforge-trl-") as folder:
        return _train(trained, updates, optimizer, schedule, folder)


def sft_trainer(
    network: nn.Module,
    updates: Sequence[Sequence[Sample]],
    optimizer: OptimizerSettings,
    schedule: ScheduleSettings,
    *,
    folder: str,
    callback: Any,
) -> Any:
    """Return TRL's `SFTTrainer`, ready to train `network` itself, row by row, on exactly these updates.

    Args:
        network: see `trl_sft`; not copied.
        updates: the samples of each update, in order.
        optimizer: AdamW's settings.
        schedule: without warm-up.
        folder: where the trainer may write; it writes nothing.
        callback: a `TrainerCallback` that follows the run.
    """
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    class SilentTrainer(SFTTrainer):
        def _send_telemetry(self) -> None:
            """Send nothing: no network unless asked."""

    rows_per_update = max(len(samples) for samples in updates)
    arguments = SFTConfig(
        **trainer_settings(network, optimizer, schedule, rows_per_update=rows_per_update, folder=folder),
        shuffle_dataset=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
        padding_free=False,
        loss_type="nll",
    )
    trainer = SilentTrainer(
        model=network,
        args=on_one_device(arguments),
        train_dataset=Dataset.from_list(_rows(updates)),
        processing_class=padding_tokenizer(),
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _train(
    network: nn.Module,
    updates: Sequence[Sequence[Sample]],
    optimizer: OptimizerSettings,
    schedule: ScheduleSettings,
    folder: str,
) -> TrainingTrace:
    watch = RunWatch(network)
    notes = follower(watch)
    trainer = sft_trainer(network, updates, optimizer, schedule, folder=folder, callback=notes)
    trainer.train()
    lines = update_lines(trainer)
    return TrainingTrace.of(
        watch,
        framework="trl",
        path=PATH,
        losses=tuple(float(line["loss"]) for line in lines),
        learning_rates=tuple(notes.learning_rates),
        gradient_norms=tuple(float(line["grad_norm"]) for line in lines),
        samples_per_update=tuple(
            rows - filled for rows, filled in zip(notes.rows_per_update, filling_rows(updates), strict=True)
        ),
        scheduler_count=int(trainer.lr_scheduler.last_epoch),
    )


def _rows(updates: Sequence[Sequence[Sample]]) -> list[dict[str, list[int]]]:
    """Return the rows in order, with the filling ones behind those of their update."""
    rows: list[dict[str, list[int]]] = []
    for samples, filled in zip(updates, filling_rows(updates), strict=True):
        rows += [{"input_ids": sample.token_ids_S.tolist(), "labels": labels(sample)} for sample in samples]
        rows += [{"input_ids": samples[0].token_ids_S[:2].tolist(), "labels": [-100, -100]}] * filled
    return rows
