"""Our side of a comparison: the real `train(job)`, clock and order, followed update by update from outside.

Only the recorder is a stand-in: it is where the loop reports each finished update, so the weights are read there.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from torch import nn

from traceforge.config import RunConfig, parse_run
from traceforge.models.language_model import LanguageModel
from traceforge.oracles.trace import TrainingTrace, WeightWatch
from traceforge.samples.dataset import WeightedSamples
from traceforge.samples.tokens import Sample
from traceforge.training.clock import Clock
from traceforge.training.loop import Job, train
from traceforge.training.optimizer import build_optimizer
from traceforge.training.order import UpdateOrder
from traceforge.training.progress import RunProgress

PATH = "traceforge.training.loop.train"


class Listener:
    """Stands where the recorder stands and reads the weights whenever an update is reported."""

    def __init__(self, network: nn.Module) -> None:
        self.watch = WeightWatch(network)
        self.lines: list[dict[str, Any]] = []

    def update(self, line: dict[str, Any]) -> None:
        assert not line["skipped"]
        self.lines.append(line)
        self.watch.update_done()

    def evaluation(self, line: dict[str, Any]) -> None:
        pass


class GivenOrder:
    """Update lists as a test wants them, in the place of `UpdateOrder`."""

    def __init__(self, updates: Sequence[Sequence[Sample]]) -> None:
        self._updates = [tuple(samples) for samples in updates]

    def updates(self, *, passes: int | None, pass_number: int = 0, position: int = 0):
        for place, samples in enumerate(self._updates):
            yield 0, place, samples


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """Return a run's settings; nothing in it is loaded from a path."""
    return parse_run({"model": {"name_or_path": "none"}, "data": {"train": "none"}, **sections}, source="test")


def update_order(samples: Sequence[Sample], config: RunConfig) -> UpdateOrder:
    """Return the real order over `samples`, as a run makes it."""
    return UpdateOrder(
        [WeightedSamples(path="test", weight=1.0, samples=tuple(samples))],
        items_per_update=config.items_per_update,
        seed=config.training.seed,
    )


def train_ours(
    model: LanguageModel,
    order: UpdateOrder | GivenOrder,
    config: RunConfig,
    *,
    total_updates: int,
    evaluated: Sequence[Sample] = (),
) -> TrainingTrace:
    """Train `model` in place by the real loop and return its trace; `evaluated` is measured between updates."""
    listener = Listener(model.model)
    job = Job(
        config=config,
        model=_followed(model, listener.watch),
        optimizer=build_optimizer(model.trainable(), config.optimizer),
        order=order,
        sets={"train": tuple(evaluated)} if evaluated else {},
        passes=config.training.passes,
        total_updates=total_updates,
        clock=Clock(),
        recorder=listener,
        progress=RunProgress(Console(file=io.StringIO())),
        save=lambda: None,
    )
    train(job)
    return TrainingTrace(
        framework="traceforge",
        path=PATH,
        losses=tuple(job.update_losses),
        learning_rates=tuple(line["learning_rate"] for line in listener.lines),
        gradient_norms=tuple(line["gradient_norm"] for line in listener.lines),
        samples_per_update=tuple(line["samples"] for line in listener.lines),
        early_changes=listener.watch.early_changes,
        scheduler_count=job.clock.updates,
        weights_before=listener.watch.before,
        weights_after=tuple(listener.watch.after),
    )


def _followed(model: LanguageModel, watch: WeightWatch) -> LanguageModel:
    """Let the watch look at the weights at the start of every micro-batch."""
    forward = model.row_logprobs

    def row_logprobs(row):
        watch.inside_update()
        return forward(row)

    model.row_logprobs = row_logprobs
    return model
