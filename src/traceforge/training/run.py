"""A whole run: locate, load, train, evaluate, save, report; evidence is written whatever happens on the way.

The stages are those of the evidence schema and follow each other in `_carry_out`. Each fills in facts of the
`Attempt`; an error is filed under the stage it happened in and raised again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console

from traceforge.config import RunConfig
from traceforge.doctor.examination import examine, require_fit_to_run
from traceforge.doctor.linears import FALL_BACK
from traceforge.errors import ConfigError, StorageError, TraceForgeError, TrainingError
from traceforge.evidence.provenance import framework_versions
from traceforge.evidence.recorder import RunRecorder
from traceforge.evidence.report import write_report
from traceforge.evidence.schema import Artifact, Evidence
from traceforge.hashes import folder_sha256
from traceforge.models.adapters import adapter_base, save_adapter
from traceforge.models.language_model import load_language_model
from traceforge.models.load import locate_model, weight_bytes_by_dtype
from traceforge.samples.dataset import SampleSets
from traceforge.samples.mask_view import mask_segments
from traceforge.samples.tokenizer import load_tokenizer
from traceforge.training.attempt import Attempt
from traceforge.training.checkpoint import check_continues, read_checkpoint, restore, save_checkpoint
from traceforge.training.clock import Clock
from traceforge.training.evaluation import fixed_sets, without_trace
from traceforge.training.fitting import longest_planned_row, plan_of, require_fit
from traceforge.training.interrupts import Interrupted, Stop, StopRequest
from traceforge.training.joining import check_same, join
from traceforge.training.loop import Job, measure, train
from traceforge.training.measure import fingerprints, wide_frozen_weights
from traceforge.training.methods import Item, Sets, load_sets, method_of
from traceforge.training.optimizer import build_optimizer
from traceforge.training.order import UpdateOrder
from traceforge.training.progress import RunProgress
from traceforge.training.watching import start_watch

_TOKENIZER_FILES = ("*token*", "*.jinja", "vocab.*", "merges.txt", "*.model")
_SHOWN_SAMPLES = {"train": 3, "evaluation": 1}


@dataclass(frozen=True)
class RunOutcome:
    """Where a run lies and what came of it."""

    folder: Path
    evidence: Evidence
    report: Path


def run(
    config: RunConfig,
    *,
    dry_run: bool = False,
    extend: Path | None = None,
    console: Console | None = None,
) -> RunOutcome:
    """Carry out a run file and return where everything lies; as one rank of several if the environment says so.

    Args:
        dry_run: register the protocol only: no weights, no data, no network.
        extend: folder of an earlier run whose newest checkpoint is gone on from, in a new folder.
        console: where progress is shown; stderr if not given.

    Raises:
        TraceForgeError: the run failed by name; evidence.json and report.html of the failure are in its folder.
    """
    world, folder = join(config)
    attempt = Attempt(config, folder, "dry_run" if dry_run else "real", world.device, world=world)
    progress = RunProgress(console or Console(stderr=True))
    stop = StopRequest()
    with RunRecorder(folder, rank=world.rank) as recorder, stop.listening(), _watched(attempt):
        try:
            recorder.write_config(config.model_dump_json())
            if not dry_run:
                _carry_out(attempt, recorder, progress, extend, stop)
        except Stop as signal:
            stopped = Interrupted(f"stopped at once at {attempt.stage}", number=signal.number, hint="start it again")
            with stop.ignoring():
                _record_failure(attempt, recorder, stopped)
            raise stopped from signal
        except Exception as error:
            known = _named(error)
            with stop.ignoring():
                _record_failure(attempt, recorder, known)
            if known is error:
                raise
            raise known from error
        evidence = attempt.evidence()
        recorder.write_evidence(evidence)
        report = write_report(folder) if world.is_first else folder / "report.html"
    return RunOutcome(folder, evidence, report)


@contextmanager
def _watched(attempt: Attempt) -> Iterator[None]:
    """Sample the machine inside; only the first rank of a real run does."""
    if attempt.run_mode == "real" and attempt.world.is_first:
        attempt.watch = start_watch(attempt.world, attempt.folder)
    try:
        yield
    finally:
        if attempt.watch is not None:
            attempt.watch.sampler.stop()


def _carry_out(
    attempt: Attempt, recorder: RunRecorder, progress: RunProgress, extend: Path | None, stop: StopRequest
) -> None:
    config, world = attempt.config, attempt.world
    if extend is not None:
        read_checkpoint(extend)  # a wrong folder is told before data and weights are read
    _look_at_machine(attempt, recorder, progress)

    attempt.enter("revision_resolution")
    with world.first_goes_first("finding the model"):
        attempt.location = location = locate_model(config.model.name_or_path, config.model.revision)
    attempt.model_hash = world.share("hash of the model", location.content_hash)
    _check_adapter_base(attempt)

    attempt.enter("dataset_and_supervision")
    tokenizer = load_tokenizer(str(location.folder), template_file=config.model.template_file)
    with world.first_goes_first("tokenising"):
        attempt.sets = sets = load_sets(config, tokenizer)
    check_same(world, "training samples", sets.statistics.train_ids_hash)
    recorder.write_manifest(_manifest(attempt))
    recorder.write_samples(_mask_views(fixed_sets(config, sets), tokenizer))
    progress.say(_data_line(sets))

    _plan(attempt, sets, progress)

    attempt.enter("model_loading_and_baseline")
    attempt.job = job = _load(attempt, sets, recorder, progress, extend)
    job.stop = stop
    if world.is_first:
        job.save = partial(save_checkpoint, attempt.folder, job, train_ids_hash=sets.statistics.train_ids_hash)
    if config.evaluation.at_start:
        measure(job)

    attempt.enter("effective_updates")
    stop.finish_update = True
    train(job)
    stop.finish_update = False
    if stop.number is not None:
        job.save()
        world.close()
        raise Interrupted(
            f"stopped after update {job.clock.updates}; the state is saved",
            number=stop.number,
            hint=f"go on with the same run file and --extend {attempt.folder}",
        )
    if not job.update_losses:
        raise TrainingError("no update was applied", hint="see updates.jsonl for why each was skipped")

    attempt.enter("paired_evaluation")
    measure(job)

    attempt.enter("saving")
    if world.is_first:
        job.save()
        _save_result(attempt)
    world.close()


def _look_at_machine(attempt: Attempt, recorder: RunRecorder, progress: RunProgress) -> None:
    """Make the short examination and keep it; from here on products go through the library that it found to work."""
    dtype = getattr(torch, attempt.config.model.dtype)
    attempt.preflight = found = examine(short=True, output_dir=attempt.folder, dtypes=(dtype,), device=attempt.device)
    recorder.log(found.describe())
    require_fit_to_run(found)
    if found.blas_library == FALL_BACK:
        note = f"matrix products go through {FALL_BACK}: cuBLAS refused one"
        attempt.notes.append(note)
        progress.say(note)


def _plan(attempt: Attempt, sets: Sets, progress: RunProgress) -> None:
    """Plan the longest row of the run; a card that it cannot fit on is told before weights are read."""
    config = attempt.config
    assert attempt.location is not None
    order = UpdateOrder(sets.train, items_per_update=config.items_per_update, seed=config.training.seed)
    lists = order.updates_of_pass(0)[: config.training.updates]
    longest = longest_planned_row(lists, tokens_per_row=config.tokens_per_row, attention=config.model.attention)
    attempt.plan, why_not = plan_of(config, attempt.world, str(attempt.location.folder), longest)
    if attempt.plan is None:
        attempt.notes.append(f"memory was not planned: {why_not}")
    elif (said := require_fit(attempt.plan, config)) is not None:
        attempt.notes.append(said)
        progress.say(said)


def _load(attempt: Attempt, sets: Sets, recorder: RunRecorder, progress: RunProgress, extend: Path | None) -> Job:
    """Return the run ready to train: model, optimizer, order and clock, as new or as a checkpoint has them."""
    config = attempt.config
    assert attempt.location is not None
    checkpoint = None if extend is None else read_checkpoint(extend)
    if checkpoint is not None:
        check_continues(checkpoint, config, sets.statistics.train_ids_hash)
    attempt.model = model = load_language_model(config, attempt.location, attempt.device)
    attempt.weight_bytes = weight_bytes_by_dtype(model.model)
    if wide := wide_frozen_weights(model):
        attempt.notes.append(f"held in float32 beside {config.model.dtype} arithmetic: {', '.join(wide)}")
    world = attempt.world
    world.start()
    order = UpdateOrder(sets.train, items_per_update=config.items_per_update, seed=config.training.seed)
    passes = None if config.training.updates is not None else (config.training.passes or 1)
    job = Job(
        config=config,
        model=model,
        optimizer=build_optimizer(model.trainable(), config.optimizer),
        order=order,
        sets=fixed_sets(config, sets),
        passes=passes,
        total_updates=config.training.updates or order.num_updates(passes or 1),
        clock=Clock(),
        recorder=recorder,
        progress=progress,
        method=method_of(config, world),
        scaler=torch.amp.GradScaler(attempt.device.type) if config.model.dtype == "float16" else None,
        world=world,
    )
    torch.manual_seed(config.training.seed)
    if checkpoint is not None:
        restore(checkpoint, job)
        attempt.baseline_name = f"update {job.clock.updates} of {extend}"
        attempt.notes.append(f"goes on from {checkpoint.folder}")
    world.broadcast([parameter for _, parameter in model.trainable()])
    if job.clock.updates >= job.total_updates:
        raise ConfigError(
            f"--extend: the run has made {job.clock.updates} updates, {job.total_updates} are asked for",
            hint=f"ask for more: --set training.updates={job.clock.updates + 10}",
        )
    with without_trace(model.model):
        items = [item for source in sets.train for item in source.samples] + list(sets.evaluation)
        job.method.prepare(model, items, tokens_per_row=config.tokens_per_row)
    attempt.start_fingerprints = fingerprints(model.trainable())
    return job


def _save_result(attempt: Attempt) -> None:
    assert attempt.model is not None
    assert attempt.location is not None
    name = "adapter" if attempt.config.adapter.kind == "lora" else "model"
    folder, unfinished = attempt.folder / name, attempt.folder / f".partial-{name}"
    try:
        if name == "adapter":
            save_adapter(
                attempt.model.model, unfinished, base=attempt.location.id, revision=attempt.location.resolved_commit
            )
        else:
            attempt.model.base.save_pretrained(str(unfinished))
            for path in (path for pattern in _TOKENIZER_FILES for path in attempt.location.folder.glob(pattern)):
                shutil.copy2(path, unfinished / path.name)
        unfinished.rename(folder)
    except TraceForgeError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    except Exception as error:  # safetensors and torch wrap a full disk in errors of their own
        shutil.rmtree(unfinished, ignore_errors=True)
        raise StorageError(
            f"{folder}: could not be written: {error}", hint="free some disk space and extend the run by one update"
        ) from error
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    attempt.artifacts.append(Artifact(path=name, bytes=size, content_hash=folder_sha256(folder)))


def _check_adapter_base(attempt: Attempt) -> None:
    """Refuse an adapter that was trained on another commit of this hub model; record which one is gone on from."""
    init, location = attempt.config.adapter.init, attempt.location
    if init is None or location is None or not (init / "adapter_config.json").is_file():
        return
    attempt.baseline_name = "initial adapter"
    attempt.notes.append(f"the initial adapter is {init}, content hash {folder_sha256(init)}")
    base, revision = adapter_base(init)
    if base == location.id and revision and location.resolved_commit and revision != location.resolved_commit:
        raise ConfigError(
            f"adapter.init = {init} was trained on {base} at {revision}, "
            f"the run resolves to {location.resolved_commit}",
            hint=f"set model.revision = {revision!r}",
        )


def _manifest(attempt: Attempt) -> dict[str, Any]:
    assert attempt.location is not None
    assert attempt.sets is not None
    return {
        "schema_version": "traceforge-run/1",
        "framework": framework_versions(cuda=torch.version.cuda).model_dump(),
        "model": {
            "id": attempt.location.id,
            "requested_revision": attempt.location.requested_revision,
            "resolved_commit": attempt.location.resolved_commit,
            "resolution_source": attempt.location.resolution_source,
            "content_hash": attempt.model_hash,
        },
        "dataset": attempt.sets.statistics.as_dict(),
    }


def _mask_views(fixed: dict[str, tuple[Item, ...]], tokenizer: Any) -> list[dict[str, Any]]:
    return [
        {
            "sample_id": sample.sample_id,
            "set": name,
            "num_tokens": sample.num_tokens,
            "trained_tokens": sample.num_trained_tokens,
            "segments": msgspec.to_builtins(mask_segments(sample, tokenizer)),
        }
        for name, items in fixed.items()
        for item in items[: _SHOWN_SAMPLES[name]]
        for sample in item.samples
    ]


def _data_line(sets: Sets) -> str:
    found = sets.statistics
    held_out = f", {found.evaluation.samples} held out" if found.evaluation else ", nothing held out"
    refused = sum(each.count for each in found.refusals.values())
    unit = "samples" if isinstance(sets, SampleSets) else "pairs"
    return (
        f"{found.train.samples} training {unit}{held_out}, {refused} refused; median {found.train.tokens_median:,.0f} "
        f"tokens, {found.train.trained_share:.1%} of the tokens trained"
    )


def _record_failure(attempt: Attempt, recorder: RunRecorder, error: TraceForgeError) -> None:
    """Write evidence and report of a failed run; a disk that is full may not stop the error itself."""
    recorder.log(f"{attempt.stage}: {type(error).__name__}: {error}")
    failure = attempt.failure(error)
    try:
        attempt.leave_word(failure)
        if attempt.world.is_first:
            recorder.write_evidence(attempt.evidence(failure))
            write_report(attempt.folder)
    except StorageError as second:
        error.add_note(f"and its evidence could not be written: {second.message}")


def _named(error: Exception) -> TraceForgeError:
    if isinstance(error, TraceForgeError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return TrainingError(
            f"out of GPU memory: {str(error).splitlines()[0]}",
            hint="lower data.max_tokens or training.tokens_per_row, set memory.placement = 'streamed' (lean path) or "
            "memory.recompute_layers = true (generic path), or use model.quantization = 'nf4'",
        )
    if isinstance(error, OSError):
        return StorageError(f"{error.filename or 'a file'}: {error.strerror or error}", hint="check space and rights")
    return TrainingError(f"unexpected {type(error).__name__}: {error}", hint="run again with --debug for the traceback")
