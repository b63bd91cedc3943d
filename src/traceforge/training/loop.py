"""The training loop. Everything that happens every so many updates is here, once, and counts in updates.

measure ─▶ ┌ take the next update list ─▶ set its learning rate ─▶ apply ─▶ tick or skip ─▶ record ┐ ─▶ measure
           └──────────────── measure and checkpoint when due ◀─────────────────────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from traceforge.config import RunConfig
from traceforge.errors import TrainingError
from traceforge.evidence.recorder import RunRecorder
from traceforge.models.language_model import LanguageModel
from traceforge.parallel.world import ONE_PROCESS, World
from traceforge.training.clock import Clock, is_due
from traceforge.training.evaluation import EvaluationResult, evaluate
from traceforge.training.fitting import LongestRow, longest_of
from traceforge.training.interrupts import StopRequest
from traceforge.training.measure import peak_device_bytes, peak_host_bytes
from traceforge.training.methods import Item, Method
from traceforge.training.optimizer import learning_rate, set_learning_rate
from traceforge.training.order import UpdateOrder
from traceforge.training.progress import RunProgress
from traceforge.training.update import SFT, Update, UpdateResult, apply_update, plan_update


@dataclass
class Job:
    """One run in the middle: what is trained, on what, and how far it is.

    Args:
        sets: the fixed samples of each evaluation set, by name (`train`, and `evaluation` if something is held out).
        passes: passes over the data after which the run ends; None = as many as `total_updates` need.
        total_updates: the update at which the run ends; the schedule is stretched over it.
        save: writes a checkpoint of the present state.
        scaler: loss scaling, for float16 arithmetic only.
        world: the ranks; each holds a job of its own, and all do the same in the same order.
        rows_run: rows of all ranks so far, like the counts after it.
    """

    config: RunConfig
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    order: UpdateOrder
    sets: dict[str, tuple[Item, ...]]
    passes: int | None
    total_updates: int
    clock: Clock
    recorder: RunRecorder
    progress: RunProgress
    method: Method = SFT
    save: Callable[[], object] = lambda: None
    stop: StopRequest = field(default_factory=StopRequest)
    scaler: torch.amp.GradScaler | None = None
    world: World = ONE_PROCESS
    evaluations: dict[int, dict[str, EvaluationResult]] = field(default_factory=dict)
    update_losses: list[float] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)
    rows_run: int = 0
    row_tokens_run: int = 0
    sample_tokens_run: int = 0
    forks_run: int = 0
    samples_run: int = 0
    trained_tokens_run: int = 0
    longest_row: LongestRow = (0, 0)


def train(job: Job) -> None:
    """Make updates until `job.total_updates` are done, the given passes are used up, or a stop is requested.

    The measurement before the first update and the one after the last are the caller's.

    Raises:
        TrainingError: too many updates in a row were not finite.
        EvaluationError: a fixed set has no trained token.
    """
    config, clock = job.config, job.clock
    first = clock.updates + 1
    places = job.order.updates(passes=job.passes, pass_number=clock.pass_number, position=clock.position)
    with job.progress.updates(done=clock.updates, total=job.total_updates):
        while not _asked_to_stop(job) and clock.updates < job.total_updates:
            place = next(places, None)
            if place is None:
                break
            pass_number, position, items = place
            _one_update(job, items)
            clock.consumed(pass_number, position)
            if clock.skipped_in_a_row:
                _give_up_if_hopeless(job)
                continue
            if clock.updates == first or is_due(clock, config.evaluation.every_updates):
                measure(job)
            if is_due(clock, config.checkpoint.every_updates) and clock.updates < job.total_updates:
                job.save()


def measure(job: Job) -> dict[str, EvaluationResult]:
    """Evaluate every fixed set at the present update, once, and record it."""
    update = job.clock.updates
    if update not in job.evaluations:
        found = {
            name: evaluate(
                job.model,
                items,
                tokens_per_row=job.config.tokens_per_row,
                method=job.method,
                name=name,
                world=job.world,
            )
            for name, items in job.sets.items()
        }
        job.evaluations[update] = found
        for name, result in found.items():
            job.recorder.evaluation(
                {
                    "update": update,
                    "set": name,
                    "loss": result.loss,
                    "trained_tokens": result.trained_tokens,
                    "rows": result.rows,
                    "rows_without_targets": result.rows_without_targets,
                    **result.logged,
                }
            )
        job.progress.evaluation(update=update, losses={name: result.loss for name, result in found.items()})
    return job.evaluations[update]


def _one_update(job: Job, items: Sequence[Item]) -> None:
    config, clock = job.config, job.clock
    started = time.perf_counter()
    update = plan_update(job.model, items, tokens_per_row=config.tokens_per_row, method=job.method, world=job.world)
    rate = learning_rate(
        config.schedule, config.optimizer.learning_rate, update=clock.updates, total_updates=job.total_updates
    )
    set_learning_rate(job.optimizer, rate)
    job.model.model.train()
    result = apply_update(
        job.model,
        update,
        job.optimizer,
        max_gradient_norm=config.optimizer.max_gradient_norm,
        scaler=job.scaler,
        world=job.world,
    )
    number = clock.updates + 1
    if result.skipped:
        clock.skip()
    else:
        clock.tick()
    _record(job, number, update, result, rate=rate, seconds=time.perf_counter() - started, items=items)


def _record(
    job: Job,
    number: int,
    update: Update,
    result: UpdateResult,
    *,
    rate: float,
    seconds: float,
    items: Sequence[Item],
) -> None:
    own = (len(update.rows), sum(row.num_tokens for row in update.rows), sum(row.num_forks for row in update.rows))
    num_rows, row_tokens, num_forks = map(int, job.world.sum_numbers(own))
    if not result.skipped:
        job.update_losses.append(result.loss)
        job.update_seconds.append(seconds)
    job.rows_run += num_rows
    job.row_tokens_run += row_tokens
    job.sample_tokens_run += sum(sample.num_tokens for item in items for sample in item.samples)
    job.forks_run += num_forks
    job.samples_run += update.num_samples
    trained_tokens = sum(item.num_trained_tokens for item in items)
    job.trained_tokens_run += trained_tokens
    job.longest_row = max(job.longest_row, longest_of(update.rows))
    allocated, _ = peak_device_bytes(job.model.device)
    job.recorder.update(
        {
            "update": number,
            "micro_batches": num_rows,
            "samples": update.num_samples,
            "trained_tokens": trained_tokens,
            "row_tokens": row_tokens,
            "loss": result.loss,
            "learning_rate": rate,
            "gradient_norm": result.gradient_norm,
            "seconds": seconds,
            "tokens_per_s": row_tokens / seconds,
            "peak_bytes": peak_host_bytes() if allocated is None else allocated,
            "skipped": result.skipped,
            **result.logged,
        }
    )
    job.progress.update(
        number=number,
        total=job.total_updates,
        loss=result.loss,
        tokens_per_s=row_tokens / seconds,
        skipped=result.skipped,
    )


def _asked_to_stop(job: Job) -> bool:
    return job.stop.heed(job.world.sum_numbers(job.stop.votes()))


def _give_up_if_hopeless(job: Job) -> None:
    most = job.config.training.max_skipped_updates
    if job.clock.skipped_in_a_row >= most:
        raise TrainingError(
            f"{most} updates in a row had a loss or gradient that is not finite "
            f"(after update {job.clock.updates}); the weights are those of that update",
            hint="lower optimizer.learning_rate, use model.dtype = 'bfloat16' instead of 'float16', "
            "or look at the samples with `traceforge inspect`",
        )
