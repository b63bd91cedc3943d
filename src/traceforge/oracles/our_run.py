"""Our side of a comparison: the real `train(job)` with its clock, order and rows, followed from outside.

Only the recorder is a stand-in: it is where the loop reports each finished update, so the weights are read there.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from traceforge.config import RunConfig
from traceforge.models.language_model import LanguageModel
from traceforge.oracles.trace import LOGGED, TrainingTrace
from traceforge.oracles.watch import RunWatch
from traceforge.training.clock import Clock
from traceforge.training.loop import Job, train
from traceforge.training.methods import Item, method_of
from traceforge.training.optimizer import build_optimizer
from traceforge.training.progress import RunProgress

PATH = "traceforge.training.loop.train"


def trace_our_run(
    model: LanguageModel,
    order: Any,
    config: RunConfig,
    *,
    total_updates: int,
    evaluated: Sequence[Item] = (),
) -> TrainingTrace:
    """Train `model` in place by the real loop and return its trace.

    Args:
        order: `UpdateOrder`, or what has its `updates`.
        total_updates: the schedule is stretched over them.
        evaluated: a set that is measured between updates; that must not show.
    """
    watch = RunWatch(model.model)
    recorder = _Listener(watch)
    job = Job(
        config=config,
        model=model,
        optimizer=build_optimizer(model.trainable(), config.optimizer),
        order=order,
        sets={"train": tuple(evaluated)} if evaluated else {},
        passes=config.training.passes,
        total_updates=total_updates,
        clock=Clock(),
        recorder=recorder,  # type: ignore[arg-type]
        progress=RunProgress(Console(file=io.StringIO())),
        method=method_of(config),
    )
    job.optimizer.register_step_pre_hook(lambda *_: watch.gradient_ready())
    with _followed(model, watch):
        watch.update_begins()
        train(job)
    lines = recorder.lines
    return TrainingTrace.of(
        watch,
        framework="traceforge",
        path=PATH,
        losses=tuple(job.update_losses),
        learning_rates=tuple(line["learning_rate"] for line in lines),
        gradient_norms=tuple(line["gradient_norm"] for line in lines),
        samples_per_update=tuple(line["samples"] for line in lines),
        scheduler_count=job.clock.updates,
        logged=tuple({name: line[name] for name in LOGGED} for line in lines if LOGGED[0] in line),
    )


class _Listener:
    """Stands where the recorder stands and reads the weights whenever an update is reported."""

    def __init__(self, watch: RunWatch) -> None:
        self.watch = watch
        self.lines: list[Mapping[str, Any]] = []

    def update(self, line: Mapping[str, Any]) -> None:
        """Take the report of an update; a skipped one changed nothing and is none."""
        if not line["skipped"]:
            self.lines.append(line)
            self.watch.update_done()
        self.watch.update_begins()

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Take the report of a measurement, which belongs to no update."""
        self.watch.update_begins()


@contextmanager
def _followed(model: LanguageModel, watch: RunWatch) -> Iterator[None]:
    """Let the watch look at the weights at the start of every micro-batch."""
    forward = model.row_logprobs

    def row_logprobs(row: Any) -> Any:
        watch.inside_update()
        return forward(row)

    model.row_logprobs = row_logprobs  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.row_logprobs = forward  # type: ignore[method-assign]
