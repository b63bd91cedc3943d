"""Every setting and its default. TOML in, JSON out; imports no torch.

A run file has one table per section below. An unknown key, a value out of range, or two settings that cannot be
honoured together is a `ConfigError` that names them; nothing is adjusted silently. Units stand in the names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_SAMPLES_PER_UPDATE = 4
LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


Seed = Annotated[int, Field(ge=0, lt=2**63)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSettings(_Section):
    """`[model]`: the base weights and how they are held."""

    name_or_path: str
    """A folder with safetensors and a tokenizer, or a hub id."""
    revision: str | None = None
    """Hub ids only: commit, tag or branch. It is resolved to a commit, which is loaded and recorded."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of frozen weights and of the arithmetic. Trained weights are always held in float32."""
    quantization: Literal["none", "nf4"] = "none"
    """`nf4`: frozen linears in 4 bits (double quantisation, bitsandbytes), on CUDA and on the CPU."""
    attention: Literal["auto", "tree", "packed", "plain"] = "auto"
    """`tree`: samples share their prefixes in one row. `packed`: side by side in one row, nothing shared. `plain`: one
    sample a row through the model's own attention. `auto`: the first of these that the start-up self-test admits; the
    report says which ran and why."""
    template_file: Path | None = None
    """A Jinja chat template to use instead of the tokenizer's own."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, for example `enable_thinking = false`."""


class AdapterSettings(_Section):
    """`[adapter]`: what is trained."""

    kind: Literal["lora", "none"] = "lora"
    """`none` trains all parameters."""
    rank: int = Field(16, ge=1)
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    """LoRA dropout. Not 0 means that samples cannot share computation."""
    target_modules: tuple[str, ...] = LINEAR_MODULES
    init: Path | None = None
    """A saved adapter to go on from; its rank, alpha and modules must equal the ones above."""


class DataSource(_Section):
    """One entry of `data.train`."""

    path: str
    """A folder made by `traceforge build sft`, a `.jsonl` of instruction or prompt-completion rows, or a hub id."""
    weight: float = Field(1.0, gt=0)
    """How many times each group is seen in one pass. 0.5: a different seeded half in each pass."""


class DataSettings(_Section):
    """`[data]`: samples, their rendering, lengths and split."""

    train: tuple[DataSource, ...] = Field(min_length=1)
    """One path, or a list of `{path, weight}`."""
    evaluation: str | None = None
    """A source held out entirely. Excludes `evaluation_fraction`."""
    evaluation_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the tasks (not samples) held out from `train`; at least one task if above 0."""
    revision: str | None = None
    """Hub ids only: commit, tag or branch of the data set."""
    train_rows: int | None = Field(None, ge=1)
    """Row files: take exactly this many trainable rows, chosen by a stable hash of row id and seed."""
    evaluation_rows: int | None = Field(None, ge=1)
    """Row files: hold out this many rows, chosen the same way, after the training rows."""
    rendering: Literal["chat", "transcript"] = "chat"
    """`chat`: the model's own template, each turn as at inference. `transcript`: the history as one user message."""
    target: Literal["turn", "action"] = "turn"
    """`turn`: reasoning, text and tool calls. `action`: the tool calls (or the fenced command) only."""
    loss_on: Literal["target", "all"] = "target"
    """`all` trains the context too, except what the generation prompt emits."""
    max_tokens: int = Field(2048, ge=2)
    """Longest sample, prompt and ending together."""
    length_policy: Literal["shorten_observations", "refuse", "drop_oldest", "truncate_end"] = "shorten_observations"
    observation_limit_tokens: int = Field(1024, ge=8)
    """`shorten_observations`: tokens of one observation that are kept, half at its head and half at its tail."""
    group: Literal["trajectory", "none"] = "trajectory"
    """What an update never splits: all turns of a trajectory, or nothing."""
    seed: Seed = 42

    @field_validator("train", mode="before")
    @classmethod
    def _one_path_is_a_list_of_one(cls, given: object) -> object:
        return [{"path": given}] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> DataSettings:
        ways = [
            name
            for name, given in (
                ("data.evaluation", self.evaluation is not None),
                ("data.evaluation_fraction", self.evaluation_fraction > 0),
                ("data.evaluation_rows", self.evaluation_rows is not None),
            )
            if given
        ]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} exclude each other; keep one")
        return self


class SftObjective(_Section):
    """`[objective]` with `method = "sft"`: weighted negative log-likelihood of the trained tokens."""

    method: Literal["sft"] = "sft"


class SimpoObjective(_Section):
    """`[objective]` with `method = "simpo"`: preference pairs without a reference model."""

    method: Literal["simpo"]
    beta: float = Field(2.0, gt=0)
    """Reward scale."""
    gamma: float | None = Field(None, ge=0)
    """Target margin in reward units (absolute). Without it and without `gamma_beta_ratio`: 0.5."""
    gamma_beta_ratio: float | None = Field(None, ge=0)
    """The authors' way of writing it: gamma = ratio x beta. Excludes `gamma`."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    chosen_nll_weight: float = Field(0.0, ge=0)
    """Weight of the chosen side's mean negative log-likelihood, added to each pair's loss."""

    @model_validator(mode="after")
    def _one_margin(self) -> SimpoObjective:
        if self.gamma is not None and self.gamma_beta_ratio is not None:
            raise ValueError("objective.gamma and objective.gamma_beta_ratio exclude each other; keep one")
        return self

    @property
    def absolute_gamma(self) -> float:
        """The margin in reward units, whichever way it was written."""
        if self.gamma_beta_ratio is not None:
            return self.gamma_beta_ratio * self.beta
        return 0.5 if self.gamma is None else self.gamma


class DpoObjective(_Section):
    """`[objective]` with `method = "dpo"`: preference pairs against the adapter that training starts from."""

    method: Literal["dpo"]
    beta: float = Field(0.1, gt=0)


Objective = Annotated[SftObjective | SimpoObjective | DpoObjective, Field(discriminator="method")]


class OptimizerSettings(_Section):
    """`[optimizer]`."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    offload_state: bool = False
    """Hold AdamW's moments in page-locked host memory: 8 bytes a trained weight less on the device."""
    learning_rate: float = Field(2e-4, gt=0)
    """Without it: 2e-4 for `sft`, 1e-5 for preference objectives."""
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    epsilon: float = Field(1e-8, gt=0)
    max_gradient_norm: float | None = Field(1.0, gt=0)
    """Clip the gradient of a whole update to this norm; unset with `--set optimizer.max_gradient_norm=none`."""

    @model_validator(mode="after")
    def _one_way_to_save(self) -> OptimizerSettings:
        if self.offload_state and self.name != "adamw":
            raise ValueError(f"optimizer.offload_state needs optimizer.name = 'adamw', it is {self.name!r}")
        return self


class ScheduleSettings(_Section):
    """`[schedule]`: the learning rate as a function of the update number."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """`linear` and `cosine` reach 0 one update after the last."""
    warmup_updates: int = Field(0, ge=0)


class TrainingSettings(_Section):
    """`[training]`: how much is trained, in updates. One of `updates` and `passes`; without both, one pass."""

    updates: int | None = Field(None, ge=1)
    passes: int | None = Field(None, ge=1)
    samples_per_update: int = Field(_SAMPLES_PER_UPDATE, ge=1)
    """Least number of samples an update takes; whole groups are taken until it is reached."""
    pairs_per_update: int | None = Field(None, ge=1)
    """Preference objectives: the same in pairs; unset = 4."""
    tokens_per_row: int | None = Field(None, ge=2)
    """Longest row of one forward pass; unset = twice data.max_tokens, so that the forks of a long trajectory seldom
    split its tree. Changes memory and speed, never the result."""
    max_skipped_updates: int = Field(10, ge=1)
    """Stop with an error after so many non-finite updates in a row."""
    seed: Seed = 42

    @model_validator(mode="after")
    def _updates_or_passes(self) -> TrainingSettings:
        if self.updates is not None and self.passes is not None:
            raise ValueError("training.updates and training.passes exclude each other; keep one")
        return self


class EvaluationSettings(_Section):
    """`[evaluation]`: the fixed sets that are measured before, during and after."""

    at_start: bool = True
    """Measure before the first update. Without it there is no baseline and the decision can only be `tune`."""
    every_updates: int | None = Field(None, ge=1)
    max_loss_increase: float = Field(0.05, ge=0)
    """Gate: how far the held-out loss may end above its baseline, in nats per token."""
    train_samples: int = Field(32, ge=1)
    """Size of the fixed seeded part of the training samples that is measured."""
    evaluation_samples: int = Field(256, ge=1)
    """Most held-out samples measured; a seeded part if there are more."""


class MemorySettings(_Section):
    """`[memory]`: techniques that change memory and speed, never the result."""

    path: Literal["auto", "generic", "lean"] = "auto"
    """`lean`: layers with a hand-written forward and backward that keep nothing on the device in between (LoRA on
    Llama, Mistral, Qwen2, Qwen3). `generic`: the model's own layers. `auto`: lean on a GPU where the model admits
    it; the evidence says which ran and why."""
    placement: Literal["resident", "streamed"] = "resident"
    """Where the lean path holds the layers' frozen weights: on the device, or on the host, from where each layer comes
    when it is needed."""
    recompute_attention: bool = False
    """Lean path: compute attention again in the backward pass instead of keeping its output: half the host memory."""
    tile_tokens: int = Field(4096, ge=16)
    """Lean path: tokens of a row whose MLP is computed at one time."""
    pinned_gib: float | None = Field(None, gt=0)
    """Most page-locked host memory for activations and streamed weights; unset = no limit."""
    recompute_layers: bool = False
    """Generic path: keep only each layer's input and compute the layer again in the backward pass."""
    offload_inputs: bool = False
    """With `recompute_layers`: the layers' inputs wait in page-locked host memory instead of on the device."""
    logits_chunk_tokens: int = Field(512, ge=1)
    """Trained positions whose logits exist at one time."""
    over_plan: Literal["refuse", "warn"] = "refuse"
    """A run on a GPU that cannot fit by its plan: `refuse` it before weights are loaded, or `warn` and try."""


class ParallelSettings(_Section):
    """`[parallel]`: how ranks work together, when there are several (`--ranks`, `--gpus`, torchrun)."""

    pairs: Literal["shared_prefix", "branch_parallel"] = "shared_prefix"
    """Preference objectives. `shared_prefix`: a pair is one tree on one rank. `branch_parallel`: its two branches live
    on two ranks, which exchange their scores."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """`auto`: NCCL where each rank has a GPU of its own, else gloo."""
    shared_device: bool = False
    """Allow several ranks on one GPU. Slower than one rank there: for trials."""
    exchange_timeout_s: float = Field(1800.0, gt=0)
    """How long a rank waits for the others before it gives up. A rank that died ends the run at once."""


class CheckpointSettings(_Section):
    """`[checkpoint]`: what a finished run can be extended from."""

    every_updates: int | None = Field(None, ge=1)
    """Besides the one that the end of a run always writes."""
    keep: int = Field(2, ge=1)


class EvidenceSettings(_Section):
    """`[evidence]`."""

    label: str | None = None
    """Name of the run in evidence and report; unset = run_name. Runs of one label never overwrite each other."""


class RunConfig(_Section):
    """A whole run file."""

    model: ModelSettings
    adapter: AdapterSettings = AdapterSettings()
    data: DataSettings
    objective: Objective = SftObjective()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    training: TrainingSettings = TrainingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    memory: MemorySettings = MemorySettings()
    parallel: ParallelSettings = ParallelSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evidence: EvidenceSettings = EvidenceSettings()
    output_dir: Path = Path("runs")
    run_name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_method(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        objective, optimizer = raw.get("objective", {}), raw.get("optimizer", {})
        if isinstance(objective, dict) and "method" not in objective:
            raw = {**raw, "objective": {"method": "sft", **objective}}
        preference = isinstance(objective, dict) and objective.get("method") in {"simpo", "dpo"}
        if preference and isinstance(optimizer, dict) and "learning_rate" not in optimizer:
            raw = {**raw, "optimizer": {"learning_rate": 1e-5, **optimizer}}
        return raw

    @model_validator(mode="after")
    def _settings_that_cannot_stand_together(self) -> RunConfig:
        if self.tokens_per_row < self.data.max_tokens:
            raise ValueError(
                f"training.tokens_per_row ({self.tokens_per_row}) is below data.max_tokens ({self.data.max_tokens})"
            )
        if self.adapter.kind == "none" and self.model.quantization != "none":
            raise ValueError(
                f"adapter.kind = 'none' trains all parameters, model.quantization = {self.model.quantization!r} "
                "freezes the linears; use adapter.kind = 'lora' or model.quantization = 'none'"
            )
        if self.adapter.kind == "none" and self.adapter.init is not None:
            raise ValueError("adapter.init needs adapter.kind = 'lora'")
        if self.objective.method == "sft" and self.parallel.pairs == "branch_parallel":
            raise ValueError(
                "parallel.pairs = 'branch_parallel' needs a preference objective, objective.method is 'sft'"
            )
        if self.adapter.dropout and self.model.attention in {"tree", "packed"}:
            raise ValueError(
                f"model.attention = {self.model.attention!r} cannot be honoured with adapter.dropout = "
                f"{self.adapter.dropout}: samples that share computation would share what is dropped; "
                "set adapter.dropout = 0 or model.attention = 'plain'"
            )
        if self.objective.method != "sft" and self.training.samples_per_update != _SAMPLES_PER_UPDATE:
            raise ValueError(
                f"training.samples_per_update counts samples, objective.method is {self.objective.method!r}; "
                "use training.pairs_per_update"
            )
        if self.parallel.pairs == "branch_parallel" and self.adapter.dropout:
            raise ValueError("parallel.pairs = 'branch_parallel' needs adapter.dropout = 0: its ranks must agree")
        if self.objective.method == "sft" and self.training.pairs_per_update is not None:
            raise ValueError("training.pairs_per_update needs a preference objective, objective.method is 'sft'")
        return self

    @model_validator(mode="after")
    def _settings_of_one_path_only(self) -> RunConfig:
        memory = self.memory
        lean_only = [
            f"memory.{name} = {value!r}"
            for name, value, default in (
                ("placement", memory.placement, "resident"),
                ("recompute_attention", memory.recompute_attention, False),
            )
            if value != default
        ]
        if memory.offload_inputs and not memory.recompute_layers:
            raise ValueError("memory.offload_inputs needs memory.recompute_layers = true: it moves what that keeps")
        if memory.path == "generic" and lean_only:
            raise ValueError(
                f"{lean_only[0]} belongs to the lean path, memory.path is 'generic'; "
                "remove it or set memory.path = 'auto'"
            )
        wanted = ["memory.path = 'lean'"] if memory.path == "lean" else lean_only
        for name, stands_against in (
            ("memory.recompute_layers = true", memory.recompute_layers),
            ("adapter.kind = 'none'", self.adapter.kind == "none"),
            ("model.attention = 'plain'", self.model.attention == "plain"),
        ):
            if wanted and stands_against:
                raise ValueError(f"{wanted[0]} needs the lean path, which {name} excludes; keep one of them")
        return self

    @property
    def items_per_update(self) -> int:
        """Samples or pairs that an update takes at least, by the objective."""
        if self.objective.method == "sft":
            return self.training.samples_per_update
        return self.training.pairs_per_update or 4

    @property
    def tokens_per_row(self) -> int:
        """Longest row in tokens, with the default filled in."""
        return self.training.tokens_per_row or 2 * self.data.max_tokens
