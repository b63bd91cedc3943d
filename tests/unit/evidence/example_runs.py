"""Run folders for the tests of evidence and report: finished, failed and dry, as training leaves them."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from traceforge.config import RunConfig
from traceforge.evidence.recorder import RunRecorder, create_run_folder
from traceforge.evidence.schema import (
    Artifact,
    Attention,
    Candidate,
    DatasetIdentity,
    Evidence,
    Failure,
    Framework,
    Hardware,
    LayerPath,
    Losses,
    MechanismMetrics,
    ModelIdentity,
    Monitor,
    Packing,
    Quantization,
    Techniques,
    Workload,
    decide,
)
from traceforge.run_files import parse_run

STARTED = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SHA = "5f2c1e0b7a9d4c3e8f6a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60"

SYSTEM = """You are a helpful assistant that can interact with a computer shell to solve programming tasks.
Your response must contain exactly ONE bash code block with ONE command (or commands connected with && or ||).
Include a THOUGHT section before your command where you explain your reasoning process.
"""

TASK = (
    "<pr_description>\nTimeDelta serialization precision: fields.TimeDelta rounds down instead of rounding to the "
    "nearest integer, so 345 milliseconds become 344.\n</pr_description>\n\n"
    + "\n".join(
        f"{number}. Work in /testbed, one command at a time, and read what it prints." for number in range(1, 25)
    )
)

OBSERVATION = (
    "<returncode>0</returncode>\n<output>\n"
    "src/marshmallow/fields.py:1474:        base_unit = timedelta(**{self.precision: 1})\n"
    "src/marshmallow/fields.py:1475:        return int(value.total_seconds() / base_unit.total_seconds())\n</output>\n"
)

ANSWER = (
    "THOUGHT: The division is truncated by int(). I will round instead.\n\n```bash\n"
    "sed -i 's/return int(value.total_seconds/return round(value.total_seconds/' src/marshmallow/fields.py\n```"
)


def config(**overrides: Any) -> RunConfig:
    """Return the settings of the example run."""
    raw: dict[str, Any] = {
        "model": {"name_or_path": "models/SmolLM2-135M-Instruct", "dtype": "float32"},
        "data": {"train": "runs/demo/samples", "evaluation_fraction": 0.25, "max_tokens": 3072},
        "schedule": {"kind": "cosine", "warmup_updates": 4},
        "training": {"updates": 60, "samples_per_update": 4},
        "evaluation": {"every_updates": 10},
        "evidence": {"label": "demo on four mini-swe-agent runs"},
        "run_name": "demo",
    }
    return parse_run({**raw, **overrides}, source="example.toml")


def update_line(update: int, total: int, *, noise: random.Random, skipped: bool = False) -> dict[str, Any]:
    """Return a plausible line of updates.jsonl."""
    loss = 0.9 + 1.3 * math.exp(-3 * update / total) + noise.gauss(0, 0.08)
    seconds = max(0.4, noise.gauss(2.4, 0.35)) + (6.0 if update == 1 else 0.0)
    row_tokens = noise.randint(7000, 12000)
    warmup = min(1.0, update / 5)
    return {
        "update": update,
        "micro_batches": noise.randint(2, 4),
        "samples": noise.randint(4, 9),
        "trained_tokens": noise.randint(500, 1100),
        "row_tokens": row_tokens,
        "loss": math.nan if skipped else loss,
        "learning_rate": 2e-4 * warmup * 0.5 * (1 + math.cos(math.pi * update / (total + 1))),
        "gradient_norm": math.inf if skipped else max(0.05, noise.lognormvariate(-0.4, 0.45)),
        "seconds": seconds,
        "tokens_per_s": row_tokens / seconds,
        "peak_bytes": int(2.1 * 2**30 + min(update, 12) * 2**24),
        "skipped": skipped,
    }


def dataset_statistics() -> dict[str, Any]:
    """Return the `dataset` part of a manifest, with the fields that the samples layer writes."""
    train = {
        "samples": 86, "tasks": 3, "trajectories": 3, "tokens_total": 214_870, "tokens_min": 1_655,
        "tokens_median": 2512.0, "tokens_p95": 3044, "tokens_max": 3071, "trained_tokens": 11_274,
        "trained_share": 0.05247, "total_weight": 11274.0, "repeated_prefix_share": 0.9021,
        "cuts": {"observation_shortened": 41}, "cut_samples": 33, "ids_hash": SHA, "identical_in_train": 0,
    }  # fmt: skip
    return {
        "dataset_id": "runs/demo/samples", "requested_revision": None, "resolved_commit": None,
        "resolution_source": "local_hash", "content_hash": SHA, "selection_seed": 42, "train_ids_hash": SHA,
        "evaluation_ids_hash": SHA[::-1], "train": train,
        "train_trees": {
            "group": "trajectory", "sample_tokens": 214_870, "tree_tokens": 21_036, "trees": 3, "forks": 83,
        },
        "evaluation": {
            **train, "samples": 19, "tasks": 1, "trajectories": 1, "tokens_total": 45_100, "trained_tokens": 2_410,
            "cuts": {}, "cut_samples": 0,
        },
        "sources": [
            {
                "path": "runs/demo/samples", "role": "train", "kind": "turns", "weight": 1.0, "available": 131,
                "examined": 131, "kept": 105, "refusals": {}, "requested_revision": None, "resolved_commit": None,
                "resolution_source": "local_hash", "content_hash": SHA,
            }
        ],
        "refusals": {
            "too_long": {
                "count": 24,
                "examples": [f"marshmallow-code__marshmallow-1359#{turn}" for turn in range(12, 32)],
                "detail": "3,911 tokens after every observation was shortened, data.max_tokens is 3,072",
            },
            "no_trained_token": {
                "count": 2,
                "examples": ["pvlib__pvlib-python-1854#0"],
                "detail": "the turn has neither text nor tool calls",
            },
        },
        "default_system_prompt": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
        "samples_with_default_system_prompt": 0,
    }  # fmt: skip


def sample_views() -> list[dict[str, Any]]:
    """Return the samples of the mask view."""
    prompt = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{TASK}<|im_end|>\n<|im_start|>assistant\n"
    history = f"{ANSWER}<|im_end|>\n<|im_start|>user\n{OBSERVATION}<|im_end|>\n<|im_start|>assistant\n"
    last = "THOUGHT: All tests pass.\n\n```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```<|im_end|>"
    return [
        {
            "sample_id": f"marshmallow-code__marshmallow-1359-{number}#{number}",
            "set": name,
            "num_tokens": 1934 + number,
            "trained_tokens": 212 - number,
            "segments": [
                {"text": prompt + history * number, "trained": False, "weight": 0.0},
                {"text": ANSWER + "<|im_end|>", "trained": True, "weight": 1.0},
                {"text": f"\n<|im_start|>user\n{OBSERVATION}<|im_end|>\n<|im_start|>assistant\n", "trained": False},
                {"text": last, "trained": True, "weight": 2.0 if number == 2 else 1.0},
            ],
        }
        for number, name in ((0, "train"), (1, "train"), (2, "evaluation"))
    ]


def evidence(
    settings: RunConfig,
    *,
    baseline: Losses | None = None,
    candidate: Candidate | None = None,
    failure: Failure | None = None,
    dry_run: bool = False,
    has_evaluation_set: bool = True,
    metrics: MechanismMetrics | None = None,
) -> Evidence:
    """Return evidence as training puts it together."""
    baseline = baseline or Losses(name="base model")
    candidate = candidate or Candidate(name="not trained")
    verdict = decide(
        run_mode="dry_run" if dry_run else "real",
        failure=failure,
        baseline=baseline,
        candidate=candidate,
        has_evaluation_set=has_evaluation_set,
        max_loss_increase=settings.evaluation.max_loss_increase,
    )
    return Evidence(
        run_mode="dry_run" if dry_run else "real",
        run_label=settings.evidence.label or settings.run_name,
        started=STARTED,
        finished=STARTED + timedelta(seconds=271),
        total_s=271.4,
        framework=Framework(
            python="3.11.7", traceforge="0.1.0", traceforge_commit=SHA[:40], traceforge_modified=False,
            torch="2.13.0", transformers="5.24.0", peft="0.21.2", numpy="2.4.6",
        ),
        hardware=Hardware(
            platform="Linux 6.8 x86_64", cpu_model="AMD EPYC", cpu_cores=2, cpu_threads=2, memory_bytes=24 * 2**30
        ),
        model=ModelIdentity(id=settings.model.name_or_path, resolution_source="local_folder", content_hash=SHA),
        dataset=DatasetIdentity(
            id="runs/demo/samples", resolution_source="local_hash", content_hash=SHA, train_ids_hash=SHA,
            evaluation_ids_hash=SHA[::-1], selection_seed=42,
        ),
        workload=Workload(
            id=settings.run_name, version="1", train_rows=86, evaluation_rows=19, max_tokens=settings.data.max_tokens,
            tokens_per_row=settings.tokens_per_row, samples_per_update=4, updates=settings.training.updates,
            learning_rate=2e-4, schedule="cosine", warmup_updates=4, optimizer="adamw", max_gradient_norm=1.0, seed=42,
            dtype="float32", quantization="none", adapter="lora", adapter_rank=16, rendering="chat", target="turn",
            loss_on="target", length_policy="shorten_observations", evaluate_every_updates=10,
            max_loss_increase=settings.evaluation.max_loss_increase,
        ),
        baseline=baseline,
        candidate=candidate,
        mechanism_metrics=metrics or MechanismMetrics(),
        techniques=Techniques() if dry_run else Techniques(
            attention=Attention(requested="auto", effective="tree (cpu SDPA pieces)", reason="self-test held"),
            path=LayerPath(requested="auto", effective="generic", reason="the lean path pays on a GPU, this is cpu"),
            quantization=Quantization(requested="none", quantized_modules=0, quantized_bytes=0),
            packing=Packing(
                rows=171, row_tokens=571_000, sample_tokens=5_139_000, forks=402, mean_samples_per_row=1.61
            ),
            recompute_layers=False, logits_chunk_tokens=512, loss_scaling=False,
        ),
        monitor=Monitor(reason="no GPU was used"),
        failure=failure,
        artifacts=() if failure or dry_run else (Artifact(path="adapter", bytes=9_780_000, content_hash=SHA),),
        **verdict.model_dump(),
    )  # fmt: skip


def finished_run(
    folder: Path, *, updates: int = 60, skipped: tuple[int, ...] = (23,), evaluate_every: int = 10
) -> Path:
    """Write the files of a run that went well, and return its folder."""
    settings, noise = config(), random.Random(7)
    run = create_run_folder(folder, settings.run_name)
    losses: list[float] = []
    with RunRecorder(run) as recorder:
        recorder.write_config(settings.model_dump_json())
        recorder.write_manifest({"schema_version": "traceforge-run/1", "dataset": dataset_statistics()})
        recorder.write_samples(sample_views())
        _evaluations(recorder, 0, updates)
        for update in range(1, updates + 1):
            if update in skipped:
                recorder.update(update_line(update, updates, noise=noise, skipped=True))
            line = update_line(update, updates, noise=noise)
            losses.append(line["loss"])
            recorder.update(line)
            if update in (1, updates) or update % evaluate_every == 0:
                _evaluations(recorder, update, updates)
        recorder.log("finished")
        recorder.write_evidence(
            evidence(
                settings,
                baseline=Losses(name="base model", train_loss=2.1034, evaluation_loss=2.1461),
                candidate=Candidate(
                    name=f"after update {updates}",
                    train_loss=0.9871,
                    evaluation_loss=1.3720,
                    update_losses=tuple(losses),
                ),
                metrics=_metrics(updates, len(skipped)),
            )
        )
    return run


def failed_run(folder: Path) -> Path:
    """Write the files of a run that stopped while training, and return its folder."""
    settings, noise = config(), random.Random(8)
    run = create_run_folder(folder, settings.run_name)
    with RunRecorder(run) as recorder:
        recorder.write_config(settings.model_dump_json())
        recorder.write_manifest({"schema_version": "traceforge-run/1", "dataset": dataset_statistics()})
        _evaluations(recorder, 0, 60)
        for update in range(1, 8):
            recorder.update(update_line(update, 60, noise=noise))
        for _ in range(10):
            recorder.update(update_line(8, 60, noise=noise, skipped=True))
        failure = Failure(
            stage="effective_updates",
            error_type="TrainingError",
            message="10 updates in a row had a loss or gradient that is not finite (after update 7); the weights are "
            "those of that update",
            hint="lower optimizer.learning_rate, use model.dtype = 'bfloat16' instead of 'float16', or look at the "
            "samples with `traceforge inspect`",
        )
        baseline = Losses(name="base model", train_loss=2.1034, evaluation_loss=2.1461)
        recorder.write_evidence(evidence(settings, baseline=baseline, failure=failure))
    return run


def dry_run(folder: Path) -> Path:
    """Write the files of a dry run, and return its folder."""
    settings = config()
    run = create_run_folder(folder, settings.run_name)
    with RunRecorder(run) as recorder:
        recorder.write_config(settings.model_dump_json())
        recorder.write_evidence(evidence(settings, dry_run=True))
    return run


def _evaluations(recorder: RunRecorder, update: int, total: int) -> None:
    for name, floor, rows in (("train", 0.95, 32), ("evaluation", 1.35, 19)):
        loss = floor + (2.13 - floor) * math.exp(-3.2 * update / total)
        recorder.evaluation(
            {
                "update": update, "set": name, "loss": loss, "trained_tokens": 4190, "rows": rows,
                "rows_without_targets": 0,
            }
        )  # fmt: skip


def _metrics(updates: int, skipped: int) -> MechanismMetrics:
    return MechanismMetrics(
        train_trained_tokens=4190, evaluation_trained_tokens=2410, train_rows_without_targets=0,
        evaluation_rows_without_targets=0, cut_samples=33, refused_samples=26, median_tokens=2512,
        trainable_parameters=4_884_480, trainable_share=0.0350, parameters_changed=420, optimizer_state_entries=420,
        scheduler_count=updates, updates_done=updates, skipped_updates=skipped, median_update_ms=2390,
        p95_update_ms=3040, peak_host_bytes=int(2.31 * 2**30),
        memory_parts_bytes={
            "base_weights": 538_000_000, "trained_weights": 19_537_920, "gradients": 19_537_920,
            "optimizer": 39_075_840,
        },
        train_loss_decreased=True, evaluation_loss_finite=True,
    )  # fmt: skip
