"""What stands further down in the report: data statistics, settings, and lists of facts. No HTML is written here.

What a run did not record is None, and shown as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from traceforge.evidence.formats import NOT_RECORDED, change_percent, clip, compact, integer, plain, share, size
from traceforge.evidence.schema import (
    CardMonitor,
    DatasetIdentity,
    Evidence,
    Gpu,
    Hardware,
    HostMonitor,
    MechanismMetrics,
    ModelIdentity,
    Monitor,
    Preflight,
    Techniques,
)

_MOST_REASONS = 40
_MOST_EXAMPLES = 5
_MEMORY_FIELDS = {
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_host_bytes",
    "memory_parts_bytes",
    "weight_bytes_by_dtype",
}

Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class Reason:
    """Why samples were refused or cut, and how many."""

    code: str
    count: int | None
    detail: str
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetView:
    """The `dataset` part of manifest.json. `sets` maps a set's name to its statistics.

    `shared_prefixes` says what the training samples' prefix trees save, if all of each group's samples stand in one.
    """

    sets: dict[str, Mapping[str, Any]]
    refusals: tuple[Reason, ...]
    cuts: dict[str, tuple[Reason, ...]]
    sources: tuple[Mapping[str, Any], ...]
    shared_prefixes: str | None
    default_system_prompt: str | None
    samples_with_default_system_prompt: int | None


def dataset_view(manifest: Mapping[str, Any] | None) -> DatasetView | None:
    """Return what the manifest says about the data, or None if it says nothing."""
    dataset = (manifest or {}).get("dataset")
    if not isinstance(dataset, Mapping) or not dataset:
        return None
    sets = {name: dataset[name] for name in ("train", "evaluation") if isinstance(dataset.get(name), Mapping)}
    prompt = dataset.get("default_system_prompt")
    return DatasetView(
        sets=sets,
        refusals=_refusals(dataset.get("refusals")),
        cuts={name: _cuts(statistics.get("cuts")) for name, statistics in sets.items() if statistics.get("cuts")},
        sources=tuple(each for each in dataset.get("sources") or () if isinstance(each, Mapping))[:_MOST_REASONS],
        shared_prefixes=_shared_prefixes(dataset.get("train_trees")),
        default_system_prompt=None if prompt is None else clip(str(prompt)),
        samples_with_default_system_prompt=dataset.get("samples_with_default_system_prompt"),
    )


def _shared_prefixes(trees: object) -> str | None:
    if not isinstance(trees, Mapping) or not trees.get("tree_tokens") or not trees.get("sample_tokens"):
        return None
    whose = "trajectory" if trees.get("group") == "trajectory" else "sample"
    words = _shared(int(trees["sample_tokens"]), int(trees["tree_tokens"]), trees.get("forks"))
    return f"{words}, a tree for each {whose}"


def _refusals(refusals: object) -> tuple[Reason, ...]:
    if not isinstance(refusals, Mapping):
        return ()
    return tuple(
        Reason(
            code=clip(str(code), 100),
            count=refused.get("count"),
            detail=clip(str(refused.get("detail") or ""), 600),
            examples=tuple(clip(str(each), 160) for each in (refused.get("examples") or ())[:_MOST_EXAMPLES]),
        )
        for code, refused in list(refusals.items())[:_MOST_REASONS]
        if isinstance(refused, Mapping)
    )


def _cuts(cuts: Mapping[str, int]) -> tuple[Reason, ...]:
    return tuple(Reason(code=clip(str(code), 100), count=count, detail="") for code, count in list(cuts.items())[:40])


@dataclass(frozen=True)
class SettingsSection:
    """One section of the resolved run file, in the file's order."""

    name: str
    settings: Facts


def settings_sections(config: Mapping[str, Any] | None) -> list[SettingsSection]:
    """Return run.json as sections; values at the top level come first, under no name."""
    values = config or {}
    top = [(name, plain(value)) for name, value in values.items() if not isinstance(value, Mapping)]
    sections = [SettingsSection("", top)] if top else []
    for name, value in values.items():
        if isinstance(value, Mapping):
            sections.append(SettingsSection(name, [(field, plain(each)) for field, each in value.items()]))
    return sections


def facts(part: BaseModel) -> Facts:
    """Return the fields of an evidence part that hold something, with their names in words."""
    return [(_words(name), plain(value)) for name, value in part.model_dump().items() if value not in (None, (), {})]


def identity_facts(identity: ModelIdentity | DatasetIdentity) -> Facts:
    """Return what names a model or a data set; a hash that should be there and is not is said to be missing."""
    lines: Facts = []
    for name, value in identity.model_dump().items():
        must_be_there = name in {"content_hash", "train_ids_hash", "resolution_source"}
        lines.append((_words(name), NOT_RECORDED if value is None and must_be_there else plain(value)))
    return lines


def hardware_facts(hardware: Hardware) -> Facts:
    """Return the machine in lines, each card apart."""
    lines = facts(hardware.model_copy(update={"gpus": (), "memory_bytes": None}))
    if hardware.memory_bytes is not None:
        lines.append(("memory", size(hardware.memory_bytes)))
    return lines + [(f"GPU {number}", _card(gpu)) for number, gpu in enumerate(hardware.gpus)]


def technique_facts(techniques: Techniques) -> Facts:
    """Return what ran to save memory or time, and what was asked for where that differs."""
    lines: Facts = []
    if (attention := techniques.attention) is not None:
        reason = f": {clip(attention.reason, 600)}" if attention.reason else ""
        lines.append(("attention", f"{attention.effective} (asked for: {attention.requested}){reason}"))
    if (path := techniques.path) is not None:
        reason = f": {clip(path.reason, 600)}" if path.reason else ""
        held = "" if path.host_pinned_bytes is None else f", {size(path.host_pinned_bytes)} of page-locked host memory"
        lines.append(("layers", f"{path.effective} (asked for: {path.requested}){reason}{held}"))
    if (quantization := techniques.quantization) is not None:
        held = f"{integer(quantization.quantized_modules)} modules, {size(quantization.quantized_bytes)}"
        lines.append(("held in 4 bits", "nothing" if not quantization.quantized_modules else held))
    if (packing := techniques.packing) is not None:
        mean = "" if packing.mean_samples_per_row is None else f", {packing.mean_samples_per_row:.2f} samples a row"
        lines.append(("packing", f"{integer(packing.rows)} rows, {integer(packing.row_tokens)} tokens computed{mean}"))
        if packing.sample_tokens is not None:
            lines.append(("shared prefixes", _shared(packing.sample_tokens, packing.row_tokens, packing.forks)))
    shown = {"attention": None, "path": None, "quantization": None, "packing": None}
    return lines + facts(techniques.model_copy(update=shown))


def mechanism_facts(metrics: MechanismMetrics) -> Facts:
    """Return the measured facts that no other section shows."""
    lines: Facts = []
    for name, value in metrics.model_dump().items():
        if value is None or name in _MEMORY_FIELDS:
            continue
        if name == "trainable_share":
            lines.append(("trainable share", share(value)))
        else:
            lines.append((_words(name), plain(value) if isinstance(value, bool) else integer(value)))
    return lines


def planned_facts(evidence: Evidence) -> Facts:
    """Return what was planned beside what was measured; nothing if there was no plan."""
    planned, metrics = evidence.planned_memory, evidence.mechanism_metrics
    if planned is None:
        return []
    row = f"{integer(planned.row_tokens)} tokens, {integer(planned.trained_row_tokens)} of them trained"
    lines: Facts = [("longest row", f"{row}; most is held at: {planned.moment}")]
    if planned.device_bytes is not None:
        lines.append(("card", _planned_and_measured(planned.device_bytes, metrics.peak_allocated_bytes)))
        lines.append(("host, pinned and process", f"{size(planned.host_bytes)} planned"))
    else:
        lines.append(("host", _planned_and_measured(planned.host_bytes, metrics.peak_host_bytes)))
    return lines


def _planned_and_measured(planned: int, measured: int | None) -> str:
    if measured is None:
        return f"{size(planned)} planned, nothing measured"
    return f"{size(planned)} planned, {size(measured)} measured ({change_percent(measured, planned)})"


def preflight_facts(preflight: Preflight) -> Facts:
    """Return what was looked at before the run; of what was not well, that comes first."""
    order = {"fail": 0, "warn": 1, "pass": 2}
    lines = []
    for each in sorted(preflight.findings, key=lambda finding: order[finding.status]):
        mark = "" if each.status == "pass" else f"{each.status}: "
        lines.append((each.name, f"{mark}{clip(each.text, 400)}"))
    return lines


def monitor_facts(monitor: Monitor) -> Facts:
    """Return what the cards and the host did, each card on a line of its own; what no card told is left out."""
    lines: Facts = [] if monitor.source is None else [("read through", monitor.source)]
    lines += [(f"GPU {card.gpu_index}", _card_course(card)) for card in monitor.gpus]
    if monitor.energy_j is not None:
        lines.append(("energy of the run", f"{integer(monitor.energy_j / 1000)} kJ"))
    if monitor.energy_per_trained_token_j is not None:
        lines.append(("energy per trained token", f"{compact(monitor.energy_per_trained_token_j)} J"))
    if monitor.host is not None:
        lines.append(("this process", _host_course(monitor.host)))
    return lines


def _card_course(card: CardMonitor) -> str:
    parts = [
        _mean_and_peak("busy", card.mean_utilisation_percent, card.peak_utilisation_percent, "%"),
        _mean_and_peak("power", card.mean_power_w, card.peak_power_w, "W"),
        None if card.peak_temperature_c is None else f"at most {integer(card.peak_temperature_c)} °C",
        None if card.peak_memory_bytes is None else f"at most {size(card.peak_memory_bytes)} of memory",
        f"{integer(card.samples)} samples, {integer(card.incomplete_samples)} of them incomplete",
    ]
    return "; ".join(part for part in parts if part is not None)


def _host_course(host: HostMonitor) -> str:
    resident = f"at most {size(host.peak_process_rss_bytes)} of memory when sampled"
    busy = f"{integer(host.mean_process_cpu_percent)} % of a core on average"
    load = "" if host.mean_load is None else f"; load of the host {host.mean_load:.1f}, at most {host.peak_load:.1f}"
    return f"{resident}; {busy}{load}; {integer(host.samples)} samples"


def _mean_and_peak(what: str, mean: float | None, peak: float | None, unit: str) -> str | None:
    if mean is None or peak is None:
        return None
    return f"{what} {integer(mean)} {unit} on average, {integer(peak)} {unit} at most"


def _shared(one_by_one: int, in_trees: int, forks: int | None) -> str:
    """Return how many tokens sharing saves, in words."""
    if one_by_one == in_trees:
        return f"nothing shared: {integer(one_by_one)} tokens"
    forked = "" if forks is None else f", {integer(forks)} forks"
    saved = f"{one_by_one / in_trees:.1f}-fold"
    return f"{integer(one_by_one)} tokens one by one, {integer(in_trees)} in trees ({saved}){forked}"


def _card(gpu: Gpu) -> str:
    details = [size(gpu.memory_bytes), f"capability {gpu.capability}" if gpu.capability else "", gpu.driver or ""]
    return ", ".join([gpu.name, *filter(None, details)])


def _words(name: str) -> str:
    return name.replace("_", " ")
