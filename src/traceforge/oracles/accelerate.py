"""The same samples through Accelerate's gradient accumulation, in the loop its documentation shows.

Micro-batch   One sample, plain Hugging Face forward, full logits.
Window        Accelerate decides when a window ends: after `samples_per_update` micro-batches, and at the end of a pass.
Scale         `Accelerator.backward` divides by the accumulation setting, whatever the window really holds. The loss sum
              is therefore multiplied by that setting and divided by the trained tokens of its own window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from traceforge.config import OptimizerSettings, ScheduleSettings
from traceforge.oracles.trace import (
    TrainingTrace,
    alone,
    check_samples,
    check_settings,
    labels,
    network_for_oracle,
    require,
)
from traceforge.oracles.watch import RunWatch
from traceforge.samples.tokens import Sample

PATH = "accelerate.Accelerator.accumulate"


def accelerate_sft(
    network: nn.Module,
    passes: Sequence[Sequence[Sample]],
    *,
    samples_per_update: int,
    optimizer: OptimizerSettings,
    schedule: ScheduleSettings,
) -> TrainingTrace:
    """Return what training a copy of `network` under `Accelerator.accumulate` does.

    Args:
        network: Hugging Face model, with its adapter if it has one; its trained parameters are trained.
        passes: the samples of each pass, in the order they are run.
        samples_per_update: micro-batches in a full window.
        optimizer: AdamW's settings; decay spares vectors, like everywhere.
        schedule: without warm-up.

    Raises:
        UsageError: accelerate is missing, or see `check_samples`, `check_settings` and `network_for_oracle`.
    """
    require("accelerate")
    check_samples([sample for samples in passes for sample in samples])
    check_settings(optimizer, schedule)
    trained = network_for_oracle(network).train()
    with alone():
        return _train(trained, passes, samples_per_update, optimizer, schedule)


def _train(
    network: nn.Module,
    passes: Sequence[Sequence[Sample]],
    samples_per_update: int,
    settings: OptimizerSettings,
    schedule: ScheduleSettings,
) -> TrainingTrace:
    from accelerate import Accelerator
    from transformers import get_scheduler

    windows = [_windows(samples, samples_per_update) for samples in passes]
    total_updates = sum(len(each) for each in windows)
    on_cpu = next(network.parameters()).device.type == "cpu"
    accelerator = Accelerator(gradient_accumulation_steps=samples_per_update, mixed_precision="no", cpu=on_cpu)
    adamw = _adamw(network, settings)
    model, prepared, scheduler = accelerator.prepare(
        network, adamw, get_scheduler(schedule.kind, adamw, num_warmup_steps=0, num_training_steps=total_updates)
    )
    watch = RunWatch(network)
    losses, rates, norms, sizes = [], [], [], []
    for samples, denominators in zip(passes, (_denominators(each) for each in windows), strict=True):
        window_loss, window_size = 0.0, 0
        loader = accelerator.prepare(
            torch.utils.data.DataLoader(list(samples), batch_size=1, shuffle=False, collate_fn=_one_sample)
        )
        for (ids_1S, labels_1S), denominator in zip(loader, denominators, strict=True):
            if not window_size:
                watch.update_begins()
            with accelerator.accumulate(model):
                loss = _loss_sum(model, ids_1S, labels_1S) / denominator
                accelerator.backward(loss * samples_per_update)
                window_loss, window_size = window_loss + float(loss.detach()), window_size + 1
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), _limit(settings))))
                    rates.append(float(adamw.param_groups[0]["lr"]))
                    watch.gradient_ready()
                prepared.step()
                scheduler.step()
                prepared.zero_grad()
            if not accelerator.sync_gradients:
                watch.inside_update()
                continue
            watch.update_done()
            losses.append(window_loss)
            sizes.append(window_size)
            window_loss, window_size = 0.0, 0
    return TrainingTrace.of(
        watch,
        framework="accelerate",
        path=PATH,
        losses=tuple(losses),
        learning_rates=tuple(rates),
        gradient_norms=tuple(norms),
        samples_per_update=tuple(sizes),
        scheduler_count=int(scheduler.scheduler.last_epoch),
    )


def _windows(samples: Sequence[Sample], size: int) -> list[Sequence[Sample]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _denominators(windows: Sequence[Sequence[Sample]]) -> list[int]:
    """Return, for each micro-batch of a pass, the trained tokens of the window it is expected to be in."""
    return [sum(sample.num_trained_tokens for sample in window) for window in windows for _ in window]


def _one_sample(batch: list[Sample]) -> tuple[Tensor, Tensor]:
    (sample,) = batch
    return torch.as_tensor(sample.token_ids_S)[None], torch.tensor(labels(sample))[None]


def _loss_sum(model: Any, ids_1S: Tensor, labels_1S: Tensor) -> Tensor:
    logits_SV = model(input_ids=ids_1S, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits_SV, labels_1S[0, 1:], ignore_index=-100, reduction="sum")


def _adamw(network: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}]
    groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon)


def _limit(settings: OptimizerSettings) -> float:
    return float("inf") if settings.max_gradient_norm is None else settings.max_gradient_norm
