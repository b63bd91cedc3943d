"""One attempt at a run: the stage it is in and the facts so far, so that a failure leaves as true a record as success.

Facts are filled in as they become known. Whatever happens, `evidence()` can be written from what is there.
"""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from traceforge.config import RunConfig
from traceforge.doctor.findings import Examination
from traceforge.errors import TraceForgeError
from traceforge.evidence.provenance import describe_hardware, framework_versions
from traceforge.evidence.rank_record import RankRecord, write_rank_record
from traceforge.evidence.schema import (
    Artifact,
    Attention,
    Candidate,
    DatasetIdentity,
    Evidence,
    Failure,
    Gpu,
    LayerPath,
    Losses,
    MechanismMetrics,
    ModelIdentity,
    Monitor,
    Packing,
    PlannedMemory,
    Preflight,
    PreflightFinding,
    Quantization,
    Ranks,
    RunMode,
    Stage,
    Techniques,
    Workload,
    decide,
)
from traceforge.evidence.summaries import percentile_95
from traceforge.models.language_model import LanguageModel
from traceforge.models.load import ModelLocation, linears_4bit
from traceforge.parallel.world import ONE_PROCESS, World
from traceforge.planning.plan import Plan
from traceforge.training.evaluation import EvaluationResult
from traceforge.training.fitting import plan_of, planned_memory
from traceforge.training.loop import Job
from traceforge.training.measure import fingerprints, memory_parts, peak_device_bytes, peak_host_bytes
from traceforge.training.methods import Sets
from traceforge.training.optimizer import num_state_entries
from traceforge.training.watching import Watch

WORKLOAD_VERSION = "1"


@dataclass
class Attempt:
    """What is known of a run so far.

    Args:
        stage: where it is; a failure is filed under it.
        world: the ranks; each has an attempt of its own, and that of rank 0 is written.
        watch: the monitor of rank 0; None in a dry run and on other ranks.
        plan: of the longest row that was to run.
        weight_bytes: of the model by dtype, as loaded.
        preflight: what this rank found of its machine before it began.
        start_fingerprints: digests of the trained weights before the first update.
    """

    config: RunConfig
    folder: Path
    run_mode: RunMode
    device: torch.device
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    stage: Stage = "environment_preflight"
    location: ModelLocation | None = None
    model_hash: str | None = None
    sets: Sets | None = None
    model: LanguageModel | None = None
    job: Job | None = None
    world: World = ONE_PROCESS
    watch: Watch | None = None
    preflight: Examination | None = None
    plan: Plan | None = None
    weight_bytes: dict[str, int] = field(default_factory=dict)
    start_fingerprints: dict[str, bytes] = field(default_factory=dict)
    baseline_name: str = "base model"
    notes: list[str] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)

    def enter(self, stage: Stage) -> None:
        """Go on to the next stage; one of several ranks leaves word of it."""
        self.stage = stage
        if self.watch is not None:
            self.watch.enter(stage)
        self.leave_word()

    def leave_word(self, failure: Failure | None = None) -> None:
        """Write where this rank stands, if it is one of several."""
        if self.world.size > 1:
            record = RankRecord(
                rank=self.world.rank, pid=os.getpid(), device=self.device.type, stage=self.stage, failure=failure
            )
            write_rank_record(self.folder, record)

    def evidence(self, failure: Failure | None = None) -> Evidence:
        """Return the evidence of the attempt as it stands."""
        finished = datetime.now(UTC)
        baseline, candidate = self._losses()
        held_out = bool(self.sets.evaluation) if self.sets is not None else self._holds_something_out()
        verdict = decide(
            run_mode=self.run_mode,
            failure=failure,
            baseline=baseline,
            candidate=candidate,
            has_evaluation_set=held_out,
            max_loss_increase=self.config.evaluation.max_loss_increase,
            unit="nats per token" if self.config.objective.method == "sft" else "nats per pair",
        )
        return Evidence(
            run_mode=self.run_mode,
            run_label=self.config.evidence.label or self.config.run_name,
            started=self.started,
            finished=finished,
            total_s=(finished - self.started).total_seconds(),
            framework=framework_versions(
                cuda=torch.version.cuda,
                cudnn=str(torch.backends.cudnn.version()) if torch.version.cuda else None,
            ),
            hardware=describe_hardware(device=self.device.type, gpus=self._gpus(), world=self.world.size),
            model=self._model_identity(),
            dataset=self._dataset_identity(),
            workload=self._workload(),
            baseline=baseline,
            candidate=candidate,
            mechanism_metrics=self._metrics(baseline, candidate),
            techniques=self._techniques(),
            preflight=None if self.preflight is None else _preflight(self.preflight),
            planned_memory=self._planned_memory(),
            monitor=self._monitor(),
            failure=failure,
            artifacts=tuple(self.artifacts),
            notes=tuple(self.notes),
            **verdict.model_dump(),
        )

    def failure(self, error: BaseException) -> Failure:
        """Return the record of an error at the present stage."""
        known = isinstance(error, TraceForgeError)
        several = self.world.size > 1
        message = error.message if isinstance(error, TraceForgeError) else (str(error) or type(error).__name__)
        hint = error.hint if isinstance(error, TraceForgeError) else None
        return Failure(
            stage=self.stage,
            error_type=type(error).__name__,
            message=message,
            hint=hint if known else "run again with --debug for the traceback",
            rank=self.world.rank if several else None,
            exit_code=getattr(error, "exit_code", 1) if several else None,
        )

    def _planned_memory(self) -> PlannedMemory | None:
        """Return the plan of the longest row that ran on this rank, or of the one that was to run."""
        plan = self.plan
        if plan is not None and self.location is not None and self.job is not None and self.job.longest_row[0]:
            plan, _ = plan_of(self.config, self.world, str(self.location.folder), self.job.longest_row)
        return None if plan is None else planned_memory(plan)

    def _monitor(self) -> Monitor:
        if self.watch is None:
            return Monitor(reason="a dry run uses no GPU" if self.run_mode == "dry_run" else "nothing was sampled")
        return self.watch.evidence(trained_tokens=self.job.trained_tokens_run if self.job is not None else 0)

    def _losses(self) -> tuple[Losses, Candidate]:
        evaluations = self.job.evaluations if self.job is not None else {}
        first: dict[str, EvaluationResult] = {}
        last: dict[str, EvaluationResult] = {}
        losses: list[float] = []
        if self.job is not None:
            losses = self.job.update_losses
            start = self.job.clock.updates - len(losses)
            first = evaluations.get(start, {})
            last = evaluations.get(self.job.clock.updates, {}) if losses else {}
        return (
            Losses(
                name=self.baseline_name, train_loss=_loss(first, "train"), evaluation_loss=_loss(first, "evaluation")
            ),
            Candidate(
                name=f"after update {self.job.clock.updates}" if losses and self.job else "not trained",
                train_loss=_loss(last, "train"),
                evaluation_loss=_loss(last, "evaluation"),
                update_losses=tuple(losses),
            ),
        )

    def _holds_something_out(self) -> bool:
        data = self.config.data
        return data.evaluation is not None or data.evaluation_fraction > 0 or data.evaluation_rows is not None

    def _gpus(self) -> list[Gpu]:
        cards = {each.identity: each for each in self.world.devices if each.kind == "cuda"}
        return [
            Gpu(name=each.name, memory_bytes=each.memory_bytes, capability=each.capability) for each in cards.values()
        ]

    def _model_identity(self) -> ModelIdentity:
        asked = self.config.model
        if self.location is None:
            return ModelIdentity(id=asked.name_or_path, requested_revision=asked.revision)
        return ModelIdentity(
            id=self.location.id,
            requested_revision=self.location.requested_revision,
            resolved_commit=self.location.resolved_commit,
            resolution_source=self.location.resolution_source,
            content_hash=self.model_hash,
        )

    def _dataset_identity(self) -> DatasetIdentity:
        data = self.config.data
        if self.sets is None:
            return DatasetIdentity(
                id=", ".join(source.path for source in data.train),
                requested_revision=data.revision,
                selection_seed=data.seed,
            )
        found = self.sets.statistics
        return DatasetIdentity(
            id=found.dataset_id,
            requested_revision=found.requested_revision,
            resolved_commit=found.resolved_commit,
            resolution_source=found.resolution_source,
            content_hash=found.content_hash,
            train_ids_hash=found.train_ids_hash,
            evaluation_ids_hash=found.evaluation_ids_hash,
            selection_seed=found.selection_seed,
        )

    def _workload(self) -> Workload:
        config = self.config
        counts = self.sets.statistics if self.sets is not None else None
        return Workload(
            id=config.run_name,
            version=WORKLOAD_VERSION,
            method=config.objective.method,
            train_rows=counts.train.samples if counts else config.data.train_rows,
            evaluation_rows=(counts.evaluation.samples if counts.evaluation else 0)
            if counts
            else config.data.evaluation_rows,
            max_tokens=config.data.max_tokens,
            tokens_per_row=config.tokens_per_row,
            samples_per_update=config.training.samples_per_update,
            updates=self.job.total_updates if self.job else config.training.updates,
            learning_rate=config.optimizer.learning_rate,
            schedule=config.schedule.kind,
            warmup_updates=config.schedule.warmup_updates,
            optimizer=config.optimizer.name,
            max_gradient_norm=config.optimizer.max_gradient_norm,
            seed=config.training.seed,
            dtype=config.model.dtype,
            quantization=config.model.quantization,
            adapter=config.adapter.kind,
            adapter_rank=config.adapter.rank if config.adapter.kind == "lora" else None,
            rendering=config.data.rendering,
            target=config.data.target,
            loss_on=config.data.loss_on,
            length_policy=config.data.length_policy,
            evaluate_every_updates=config.evaluation.every_updates,
            max_loss_increase=config.evaluation.max_loss_increase,
        )

    def _metrics(self, baseline: Losses, candidate: Candidate) -> MechanismMetrics:
        facts: dict[str, object] = {"peak_host_bytes": peak_host_bytes() if self.run_mode == "real" else None}
        if self.sets is not None:
            found = self.sets.statistics
            parts = [part for part in (found.train, found.evaluation) if part is not None]
            facts |= {
                "cut_samples": sum(part.cut_samples for part in parts),
                "refused_samples": sum(refused.count for refused in found.refusals.values()),
                "median_tokens": found.train.tokens_median,
            }
        if self.model is not None:
            trainable = self.model.trainable()
            trained = sum(parameter.numel() for _, parameter in trainable)
            facts |= {
                "trainable_parameters": trained,
                "trainable_share": trained / sum(_num_weights(each) for each in self.model.model.parameters()),
            }
            if self.start_fingerprints:
                now = fingerprints(trainable)
                facts["parameters_changed"] = sum(now[name] != old for name, old in self.start_fingerprints.items())
            facts["weight_bytes_by_dtype"] = self.weight_bytes
            facts["peak_allocated_bytes"], facts["peak_reserved_bytes"] = peak_device_bytes(self.device)
        if self.job is not None:
            facts |= _job_metrics(self.job)
        if baseline.train_loss is not None and candidate.train_loss is not None:
            facts["train_loss_decreased"] = candidate.train_loss < baseline.train_loss
        if candidate.evaluation_loss is not None:
            facts["evaluation_loss_finite"] = math.isfinite(candidate.evaluation_loss)
        return MechanismMetrics.model_validate(facts)

    def _techniques(self) -> Techniques:
        if self.model is None:
            return Techniques()
        four_bit = linears_4bit(self.model.model)
        job = self.job
        return Techniques(
            attention=Attention(
                requested=self.config.model.attention,
                effective=self.model.effective_attention(),
                reason=self.model.layout_reason,
            ),
            path=LayerPath(
                requested=self.config.memory.path,
                effective=self.model.effective_path(),
                reason=self.model.path_reason or None,
                host_pinned_bytes=self.model.host_pinned_bytes(),
            ),
            quantization=Quantization(
                requested=self.config.model.quantization,
                quantized_modules=len(four_bit),
                quantized_bytes=sum(layer.weight.numel() * layer.weight.element_size() for layer in four_bit)
                if self.model.lean is None
                else self.model.lean.quantized_bytes,
            ),
            packing=Packing(
                rows=job.rows_run,
                row_tokens=job.row_tokens_run,
                sample_tokens=job.sample_tokens_run,
                forks=job.forks_run,
                mean_samples_per_row=job.samples_run / job.rows_run,
            )
            if job is not None and job.rows_run
            else None,
            recompute_layers=self.config.memory.recompute_layers,
            logits_chunk_tokens=self.config.memory.logits_chunk_tokens,
            loss_scaling=job is not None and job.scaler is not None,
            ranks=Ranks(data=self.world.data_size, branch=self.world.branch_size, backend=self.world.backend)
            if self.world.size > 1
            else None,
        )


def _preflight(found: Examination) -> Preflight:
    return Preflight(
        blas_library=found.blas_library,
        seconds=round(found.seconds, 3),
        findings=tuple(
            PreflightFinding(name=each.name, status=each.status, text=each.text, way_out=each.way_out)
            for each in found.findings
        ),
    )


def _job_metrics(job: Job) -> dict[str, object]:
    measured = job.evaluations.get(max(job.evaluations, default=-1), {})
    train, evaluation = measured.get("train"), measured.get("evaluation")
    milliseconds = [1000 * seconds for seconds in job.update_seconds]
    return {
        "train_trained_tokens": train.trained_tokens if train else None,
        "evaluation_trained_tokens": evaluation.trained_tokens if evaluation else None,
        "train_rows_without_targets": train.rows_without_targets if train else None,
        "evaluation_rows_without_targets": evaluation.rows_without_targets if evaluation else None,
        "optimizer_state_entries": num_state_entries(job.optimizer),
        "scheduler_count": job.clock.updates,
        "updates_done": job.clock.updates,
        "skipped_updates": job.clock.skipped,
        "median_update_ms": statistics.median(milliseconds) if milliseconds else None,
        "p95_update_ms": percentile_95(milliseconds),
        "memory_parts_bytes": memory_parts(job.model, job.optimizer),
    }


def _loss(results: dict[str, EvaluationResult], name: str) -> float | None:
    return results[name].loss if name in results else None


def _num_weights(parameter: torch.nn.Parameter) -> int:
    # bitsandbytes packs two 4-bit weights in a byte; count weights, not bytes.
    return parameter.numel() * 2 if type(parameter).__name__ == "Params4bit" else parameter.numel()
