"""The parts of evidence.json that say how the machine was before the run, and what it did during it."""

from __future__ import annotations

from typing import Literal

from traceforge.evidence.decision import EvidencePart


class PreflightFinding(EvidencePart):
    """One line of `traceforge doctor --short`, as it stood when the run began."""

    name: str
    status: Literal["pass", "warn", "fail"]
    text: str
    way_out: str | None = None


class Preflight(EvidencePart):
    """What the run looked at before it began."""

    blas_library: str | None = None
    """What matrix products on the card went through: `cublas`, or `cublaslt` where cuBLAS refused; null on the CPU."""
    seconds: float
    findings: tuple[PreflightFinding, ...]


class PlannedMemory(EvidencePart):
    """What was predicted for the longest row that ran (or, where none ran, that would have)."""

    path: str
    """`lean` or `generic`."""
    row_tokens: int
    trained_row_tokens: int
    moment: str
    """Of an update, at which most is held."""
    parts_bytes: dict[str, int]
    """By part, at that moment."""
    device_bytes: int | None = None
    """What `mechanism_metrics.peak_allocated_bytes` was predicted to be; null on the CPU."""
    host_bytes: int
    """On the CPU what `peak_host_bytes` was predicted to be; beside a card pinned memory and the process."""
    fits: bool
    """Into the card and the host of this run."""


class CardMonitor(EvidencePart):
    """One card during the run: means and peaks over the samples that have the value; null = none had it."""

    gpu_index: int
    """The driver's number, as in gpu.csv."""
    samples: int
    incomplete_samples: int
    """Samples in which the card left something out (N/A, not supported, no answer)."""
    mean_utilisation_percent: float | None = None
    peak_utilisation_percent: float | None = None
    mean_power_w: float | None = None
    peak_power_w: float | None = None
    peak_temperature_c: float | None = None
    peak_memory_bytes: int | None = None
    """Of the whole card, other programs included."""


class HostMonitor(EvidencePart):
    """This process and its host during the run."""

    samples: int
    mean_process_rss_bytes: int | None = None
    peak_process_rss_bytes: int | None = None
    """The highest sample; `mechanism_metrics.peak_host_bytes` is the true peak."""
    mean_process_cpu_percent: float | None = None
    """100 for each core kept busy."""
    mean_load: float | None = None
    """Processes that ran or waited, of the whole host, averaged over a minute."""
    peak_load: float | None = None


class Monitor(EvidencePart):
    """What the graphics cards reported during the run; null where there is none. Means are means over the cards."""

    source: str | None = None
    """`NVML` or `nvidia-smi`."""
    mean_utilisation_percent: float | None = None
    peak_utilisation_percent: float | None = None
    mean_power_w: float | None = None
    peak_power_w: float | None = None
    peak_temperature_c: float | None = None
    peak_memory_bytes: int | None = None
    """Of one card."""
    energy_j: float | None = None
    """Of all cards together, from the start of the run to its end."""
    training_energy_j: float | None = None
    """The same while updates were made, evaluations between them included."""
    energy_per_trained_token_j: float | None = None
    """`training_energy_j` for each trained token of the updates."""
    gpus: tuple[CardMonitor, ...] = ()
    host: HostMonitor | None = None
    reason: str | None = None
    """Why there are no numbers, or why they end early."""
