"""What TRL's trainers have in common here: the same arithmetic, the same update, a line for each, and nothing else.

Micro-batch   One row, already tokenised.
Update        `gradient_accumulation_steps` rows. A shorter one is filled up with rows that add exactly zero to loss and
              gradient. The last one is left short; that is the trainer's own case.
Overridden    bf16, activation checkpointing, shuffling, fused AdamW, more than one GPU (`DataParallel`), progress
              output, and TRL's usage report, which would go over the network.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from traceforge.config import OptimizerSettings, ScheduleSettings
from traceforge.oracles.watch import RunWatch


def trainer_settings(
    network: nn.Module, optimizer: OptimizerSettings, schedule: ScheduleSettings, *, rows_per_update: int, folder: str
) -> dict[str, Any]:
    """Return the arguments that `SFTConfig` and `CPOConfig` share."""
    on_cuda = next(network.parameters()).is_cuda
    return {
        "output_dir": folder,
        # the same work
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": rows_per_update,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        # the same arithmetic
        "bf16": False,
        "fp16": False,
        "tf32": False if on_cuda else None,
        "gradient_checkpointing": False,
        "use_cpu": not on_cuda,
        # the same update
        "optim": "adamw_torch",
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.epsilon,
        "max_grad_norm": optimizer.max_gradient_norm or 0.0,
        "lr_scheduler_type": schedule.kind,
        "warmup_steps": 0,
        # a line for every update, and nothing else
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def on_one_device(arguments: Any) -> Any:
    """Return the trainer's arguments so that a machine with several GPUs does not spread each micro-batch over them."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # the only way in: the property counts what is visible
    return arguments


def filling_rows(updates: Sequence[Sequence[Any]]) -> list[int]:
    """Return how many rows each update needs to be as long as the longest; the last stays short."""
    size = max(len(rows) for rows in updates)
    return [size - len(rows) for rows in updates[:-1]] + [0]


def update_lines(trainer: Any) -> list[dict[str, float]]:
    """Return what the trainer logged of each update."""
    return [line for line in trainer.state.log_history if "loss" in line]


def follower(watch: RunWatch) -> Any:
    """Return a callback that lets `watch` follow a trainer and notes rows and learning rate of each update."""
    from transformers import TrainerCallback

    class Follower(TrainerCallback):
        def __init__(self) -> None:
            self.learning_rates: list[float] = []
            self.rows_per_update: list[int] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            self.rows_per_update.append(0)
            watch.update_begins()

        def on_substep_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            self.rows_per_update[-1] += 1
            watch.inside_update()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            self.rows_per_update[-1] += 1
            watch.inside_update()
            watch.gradient_ready()
            self.learning_rates.append(float(keywords["optimizer"].param_groups[0]["lr"]))

        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            watch.update_done()

    return Follower()


@contextmanager
def quietly() -> Iterator[None]:
    """Keep the library's deprecations and its notes on the stand-in tokenizer from the user, who caused neither."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", message="You are importing from 'trl.experimental'")
            yield
    finally:
        logging.set_verbosity(verbosity)


def padding_tokenizer() -> Any:
    """Return the smallest tokenizer that the trainers accept: it only names the padding, which is masked out."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    empty = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))  # noqa: S106 - a token of text, no secret
    return PreTrainedTokenizerFast(tokenizer_object=empty, pad_token="<pad>", eos_token="<pad>")  # noqa: S106
