"""evidence.json: what was asked, what ran, on what, what was measured, and the decision that follows.

Numbers  Losses are token-weighted means in nats per trained token. A number that does not exist (a dry run, a failure
         before it was measured) is null. JSON has no NaN: a number that was measured and is not finite is null too,
         and `non_finite` names its field and what it was ("nan", "inf", "-inf").
Checks   `decide` is the only place where a decision is made; `Evidence` refuses a decision that its own level,
         failure or checks contradict.
Schema   `python -m traceforge.evidence.schema` prints the JSON Schema that docs/evidence.schema.json holds.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from pydantic import AwareDatetime, Field, model_validator

from traceforge.evidence.decision import (
    DECISIONS_OF_LEVEL,
    Check,
    CheckName,
    Decision,
    EvidenceLevel,
    EvidencePart,
    Failure,
    Losses,
    RunMode,
    Stage,
    Verdict,
    decide,
)
from traceforge.evidence.machine_parts import (
    CardMonitor,
    HostMonitor,
    Monitor,
    PlannedMemory,
    Preflight,
    PreflightFinding,
)

__all__ = [
    "SCHEMA_VERSION",
    "Artifact",
    "Attention",
    "Candidate",
    "CardMonitor",
    "Check",
    "CheckName",
    "DatasetIdentity",
    "Decision",
    "Evidence",
    "EvidenceLevel",
    "Failure",
    "Framework",
    "Gpu",
    "Hardware",
    "HostMonitor",
    "Losses",
    "MechanismMetrics",
    "ModelIdentity",
    "Monitor",
    "Packing",
    "PlannedMemory",
    "Preflight",
    "PreflightFinding",
    "Quantization",
    "Ranks",
    "RunMode",
    "Stage",
    "Techniques",
    "Verdict",
    "Workload",
    "decide",
    "json_schema",
]

SCHEMA_VERSION = "traceforge-evidence/1"


class Framework(EvidencePart):
    """Versions of what ran; null = not installed."""

    python: str
    traceforge: str
    traceforge_commit: str | None = None
    """Git commit of the source checkout; null when installed from a package."""
    traceforge_modified: bool | None = None
    """Whether that checkout had uncommitted changes."""
    torch: str | None = None
    transformers: str | None = None
    tokenizers: str | None = None
    peft: str | None = None
    accelerate: str | None = None
    bitsandbytes: str | None = None
    safetensors: str | None = None
    liger_kernel: str | None = None
    trl: str | None = None
    numpy: str | None = None
    pydantic: str | None = None
    cuda: str | None = None
    """CUDA version that torch was built for; null on a CPU build."""
    cudnn: str | None = None


class Gpu(EvidencePart):
    """One graphics card that the run used."""

    name: str
    memory_bytes: int
    capability: str | None = None
    """Compute capability, such as "8.6"."""
    driver: str | None = None


class Hardware(EvidencePart):
    """The machine, without anything that names it or its owner."""

    platform: str
    cpu_model: str | None = None
    cpu_cores: int | None = None
    """Physical cores."""
    cpu_threads: int | None = None
    """Logical processors that this process may use."""
    memory_bytes: int | None = None
    device: str = "cpu"
    """Where the model ran: `cpu` or `cuda`."""
    gpus: tuple[Gpu, ...] = ()
    world: int = Field(1, ge=1)
    """Ranks."""


class ModelIdentity(EvidencePart):
    """The base weights, by name, revision and content."""

    id: str
    requested_revision: str | None = None
    resolved_commit: str | None = None
    resolution_source: str | None = None
    """`hub` or `local_folder`; null when not resolved."""
    content_hash: str | None = None


class DatasetIdentity(EvidencePart):
    """The data, by name, revision, content and the ids that were drawn."""

    id: str
    requested_revision: str | None = None
    resolved_commit: str | None = None
    resolution_source: str | None = None
    content_hash: str | None = None
    train_ids_hash: str | None = None
    """Hash of the ordered sample ids of the training set."""
    evaluation_ids_hash: str | None = None
    selection_seed: int | None = None


class Workload(EvidencePart):
    """What was asked: the protocol that a dry run registers and a real run carries out."""

    id: str
    version: str
    method: str = "sft"
    train_rows: int | None = None
    """Training samples after refusals."""
    evaluation_rows: int | None = None
    """Held-out samples after refusals; 0 = no held-out set."""
    max_tokens: int
    tokens_per_row: int | None = None
    samples_per_update: int
    updates: int | None = None
    """Updates asked for; null in a dry run that cannot know them without tokenising."""
    learning_rate: float
    schedule: str | None = None
    warmup_updates: int | None = None
    optimizer: str | None = None
    max_gradient_norm: float | None = None
    seed: int
    dtype: str | None = None
    quantization: str | None = None
    adapter: str | None = None
    """`lora` or `none` (all parameters)."""
    adapter_rank: int | None = None
    rendering: str | None = None
    target: str | None = None
    loss_on: str | None = None
    length_policy: str | None = None
    evaluate_every_updates: int | None = None
    max_loss_increase: float | None = None
    """The gate: how far the held-out loss may end above its baseline, in nats per token."""


class Candidate(Losses):
    """The trained model."""

    update_losses: tuple[float | None, ...] = ()
    """Training loss of every update, in order; of different samples each time, unlike `train_loss`."""


class Attention(EvidencePart):
    """Which attention ran, and why."""

    requested: str
    effective: str
    reason: str | None = None


class LayerPath(EvidencePart):
    """Which way rows took through the layers: the model's own code or the lean one, and how."""

    requested: str
    effective: str
    reason: str | None = None
    host_pinned_bytes: int | None = None
    """Page-locked host memory held: streamed weights, activations, vocabulary tables. null = the generic path."""


class Quantization(EvidencePart):
    """What is really held in 4 bits, counted on the loaded modules."""

    requested: str
    quantized_modules: int
    quantized_bytes: int


class Packing(EvidencePart):
    """How the training samples fell into rows."""

    rows: int
    """Rows run in all updates together."""
    row_tokens: int
    """Tokens computed in them; there is no padding."""
    sample_tokens: int | None = None
    """Tokens of the same samples one by one: what the rows would hold if no prefix were shared."""
    forks: int | None = None
    """Paths in those rows that continue another one instead of repeating it."""
    mean_samples_per_row: float | None = None


class Ranks(EvidencePart):
    """How several ranks worked together: a grid, data x branch."""

    data: int
    """Ranks, or pairs of ranks, that had different samples."""
    branch: int
    """Ranks that a preference pair was split over."""
    backend: str


class Techniques(EvidencePart):
    """What ran to save memory or time. None of it may change a result."""

    attention: Attention | None = None
    path: LayerPath | None = None
    quantization: Quantization | None = None
    packing: Packing | None = None
    recompute_layers: bool | None = None
    logits_chunk_tokens: int | None = None
    loss_scaling: bool | None = None
    """fp16 only."""
    ranks: Ranks | None = None
    """null = one process."""


class MechanismMetrics(EvidencePart):
    """Measured facts about the mechanism: what was trained, on how many tokens, how fast, in how much memory."""

    train_trained_tokens: int | None = None
    """Trained tokens of the fixed training set that is evaluated."""
    evaluation_trained_tokens: int | None = None
    train_rows_without_targets: int | None = None
    evaluation_rows_without_targets: int | None = None
    cut_samples: int | None = None
    refused_samples: int | None = None
    median_tokens: float | None = None
    trainable_parameters: int | None = None
    trainable_share: float | None = None
    parameters_changed: int | None = None
    """Trainable tensors that differ from their start after the last update."""
    optimizer_state_entries: int | None = None
    scheduler_count: int | None = None
    """Times the schedule advanced; equals the updates done."""
    updates_done: int | None = None
    skipped_updates: int | None = None
    """Updates whose gradient was not finite: nothing changed and the clock did not tick."""
    median_update_ms: float | None = None
    p95_update_ms: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_host_bytes: int | None = None
    memory_parts_bytes: dict[str, int] = Field(default_factory=dict)
    """Memory by part (weights, gradients, optimizer, ...), where it was measured."""
    weight_bytes_by_dtype: dict[str, int] = Field(default_factory=dict)
    """Weights and buffers as loaded, the adapter included; packed 4-bit weights count as uint8."""
    train_loss_decreased: bool | None = None
    evaluation_loss_finite: bool | None = None


class Artifact(EvidencePart):
    """A file or folder that the run wrote, relative to the run folder."""

    path: str
    bytes: int
    content_hash: str | None = None


class Evidence(EvidencePart):
    """A whole evidence.json."""

    schema_version: Literal["traceforge-evidence/1"] = "traceforge-evidence/1"
    run_mode: RunMode
    run_label: str
    started: AwareDatetime
    finished: AwareDatetime
    total_s: float
    framework: Framework
    hardware: Hardware
    model: ModelIdentity
    dataset: DatasetIdentity
    workload: Workload
    baseline: Losses
    candidate: Candidate
    mechanism_metrics: MechanismMetrics = MechanismMetrics()
    techniques: Techniques = Techniques()
    preflight: Preflight | None = None
    """null in a dry run."""
    planned_memory: PlannedMemory | None = None
    """null in a dry run, and for models that cannot be planned (`notes` says why)."""
    monitor: Monitor = Monitor()
    failure: Failure | None = None
    artifacts: tuple[Artifact, ...] = ()
    evidence_level: EvidenceLevel
    decision: Decision
    decision_reasons: tuple[str, ...]
    """Plain words, the strongest first."""
    checks: tuple[Check, ...] = ()
    non_finite: dict[str, Literal["nan", "inf", "-inf"]] = Field(default_factory=dict)
    """Fields that are null because the number was not finite. Filled when the file is written."""
    notes: tuple[str, ...] = ()
    """What the recorder had to leave out, and why."""

    @model_validator(mode="after")
    def _decision_follows_from_the_rest(self) -> Evidence:
        if self.decision not in DECISIONS_OF_LEVEL[self.evidence_level]:
            raise ValueError(f"decision {self.decision!r} cannot stand on evidence level {self.evidence_level!r}")
        if (self.run_mode == "dry_run") != (self.evidence_level == "dry_run"):
            raise ValueError(f"run mode {self.run_mode!r} cannot have evidence level {self.evidence_level!r}")
        if self.run_mode == "real" and (self.failure is None) == (self.evidence_level == "failed_real_attempt"):
            raise ValueError(f"evidence level {self.evidence_level!r} contradicts failure = {self.failure!r}")
        if self.decision == "accept_mechanism" and not (self.checks and all(check.held for check in self.checks)):
            raise ValueError("decision 'accept_mechanism' needs checks, and each of them held")
        return self


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of evidence.json as it is written: every field is present."""
    schema = Evidence.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": SCHEMA_VERSION}


def json_schema_text() -> str:
    """Return the text of docs/evidence.schema.json."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(json_schema_text())
