"""The same tokens and masks through TRL's `SFTTrainer`.

Micro-batch   One row of `input_ids` and `labels`, already tokenised; TRL prepares, truncates and packs nothing.
Update        `gradient_accumulation_steps` rows. A shorter update is filled up with rows that have no label: they add
              exactly zero to loss and gradient. The last one is left short; that is the trainer's own case.
Overridden    bf16, activation checkpointing, max_length 1024, shuffling, fused AdamW, progress output, and TRL's
              usage report, which would go over the network.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from traceforge.config import OptimizerSettings, ScheduleSettings
from traceforge.errors import UsageError
from traceforge.oracles.trace import (
    TrainingTrace,
    WeightWatch,
    alone,
    check_comparable,
    labels,
    network_for_oracle,
    require,
)
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
        UsageError: trl is missing, or see `check_comparable` and `network_for_oracle`.
    """
    require("trl")
    require("datasets")
    if not updates or not all(updates):
        raise UsageError("every update needs at least one sample")
    check_comparable([sample for samples in updates for sample in samples], optimizer, schedule)
    trained = network_for_oracle(network)
    with alone(), _quietly(), tempfile.TemporaryDirectory(prefix="traceforge-trl-") as folder:
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
    from trl import SFTTrainer

    class SilentTrainer(SFTTrainer):
        def _send_telemetry(self) -> None:
            """Send nothing: no network unless asked."""

    trainer = SilentTrainer(
        model=network,
        args=_arguments(network, updates, optimizer, schedule, folder),
        train_dataset=Dataset.from_list(_rows(updates)),
        processing_class=_padding_tokenizer(),
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
    watch = WeightWatch(network)
    notes = _notes(watch)
    trainer = sft_trainer(network, updates, optimizer, schedule, folder=folder, callback=notes)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return TrainingTrace(
        framework="trl",
        path=PATH,
        losses=tuple(float(line["loss"]) for line in lines),
        learning_rates=tuple(notes.learning_rates),
        gradient_norms=tuple(float(line["grad_norm"]) for line in lines),
        samples_per_update=tuple(
            notes.rows_per_update[number] - filled for number, filled in enumerate(_fill(updates))
        ),
        early_changes=watch.early_changes,
        scheduler_count=int(trainer.lr_scheduler.last_epoch),
        weights_before=watch.before,
        weights_after=tuple(watch.after),
    )


def _arguments(
    network: nn.Module,
    updates: Sequence[Sequence[Sample]],
    optimizer: OptimizerSettings,
    schedule: ScheduleSettings,
    folder: str,
) -> Any:
    from trl import SFTConfig

    return SFTConfig(
        output_dir=folder,
        # the same work
        per_device_train_batch_size=1,
        gradient_accumulation_steps=max(len(samples) for samples in updates),
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        shuffle_dataset=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
        padding_free=False,
        loss_type="nll",
        # the same arithmetic
        bf16=False,
        fp16=False,
        tf32=False if next(network.parameters()).is_cuda else None,
        gradient_checkpointing=False,
        use_cpu=not next(network.parameters()).is_cuda,
        # the same update
        optim="adamw_torch",
        learning_rate=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.epsilon,
        max_grad_norm=optimizer.max_gradient_norm or 0.0,
        lr_scheduler_type=schedule.kind,
        warmup_steps=0,
        # a line for every update, and nothing else
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _rows(updates: Sequence[Sequence[Sample]]) -> list[dict[str, list[int]]]:
    """Return the rows in order, with the filling ones behind those of their update."""
    rows: list[dict[str, list[int]]] = []
    for samples, filled in zip(updates, _fill(updates), strict=True):
        rows += [{"input_ids": sample.token_ids_S.tolist(), "labels": labels(sample)} for sample in samples]
        rows += [{"input_ids": samples[0].token_ids_S[:2].tolist(), "labels": [-100, -100]}] * filled
    return rows


def _fill(updates: Sequence[Sequence[Sample]]) -> list[int]:
    """Return how many rows without a label each update needs to be as long as the longest; the last stays short."""
    size = max(len(samples) for samples in updates)
    return [size - len(samples) for samples in updates[:-1]] + [0]


def _notes(watch: WeightWatch) -> Any:
    """Return a callback that follows the weights and notes rows and learning rate of each update."""
    from transformers import TrainerCallback

    class Notes(TrainerCallback):
        def __init__(self) -> None:
            self.learning_rates: list[float] = []
            self.rows_per_update: list[int] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            self.rows_per_update.append(0)

        def on_substep_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            self.rows_per_update[-1] += 1
            watch.inside_update()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            self.rows_per_update[-1] += 1
            watch.inside_update()
            self.learning_rates.append(float(keywords["optimizer"].param_groups[0]["lr"]))

        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            watch.update_done()

    return Notes()


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep the library's deprecations and its notes on the stand-in tokenizer from the user, who caused neither."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(verbosity)


def _padding_tokenizer() -> Any:
    """Return the smallest tokenizer that SFTTrainer accepts; it only names the padding, which rows alone never need."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    empty = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))  # noqa: S106 - a token of text, no secret
    return PreTrainedTokenizerFast(tokenizer_object=empty, pad_token="<pad>", eos_token="<pad>")  # noqa: S106
