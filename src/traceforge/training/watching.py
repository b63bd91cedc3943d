"""The monitor of a run: which cards it samples, and what its samples come to in the evidence.

Rank 0 samples the cards of all ranks on its host. They are known by their UUIDs, as CUDA sees them, so neither the
order of CUDA_VISIBLE_DEVICES nor another program's cards can get in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from traceforge.evidence.schema import CardMonitor, HostMonitor, Monitor, Stage
from traceforge.monitor.readings import Card, MonitorError, Source, select_cards
from traceforge.monitor.sampler import Sampler
from traceforge.monitor.series import CardSeries
from traceforge.monitor.sources import open_source
from traceforge.parallel.world import World

_MIB = 2**20
Opener = Callable[[], tuple[Source, list[Card]]]


@dataclass
class Watch:
    """A sampler at work, and when each stage of the run began (seconds of `time.monotonic`).

    Args:
        reason: why no card is sampled; None = every card of the run is, or there is none.
    """

    sampler: Sampler
    reason: str | None = None
    began: dict[Stage, float] = field(default_factory=dict)

    def enter(self, stage: Stage) -> None:
        """Note that a stage begins."""
        self.began.setdefault(stage, time.monotonic())

    def evidence(self, *, trained_tokens: int) -> Monitor:
        """Stop sampling and return what was seen; `trained_tokens` are those of the updates."""
        self.sampler.stop()
        sampler, now = self.sampler, time.monotonic()
        cards = [_card(card, series) for card, series in zip(sampler.cards, sampler.cards_series, strict=True)]
        start = self.began.get("effective_updates", now)
        training_j = sampler.energy_j(start, self.began.get("paired_evaluation", now))
        return Monitor(
            source=sampler.source.name if sampler.source is not None else None,
            mean_utilisation_percent=_mean([card.mean_utilisation_percent for card in cards]),
            peak_utilisation_percent=_most([card.peak_utilisation_percent for card in cards]),
            mean_power_w=_mean([card.mean_power_w for card in cards]),
            peak_power_w=_most([card.peak_power_w for card in cards]),
            peak_temperature_c=_most([card.peak_temperature_c for card in cards]),
            peak_memory_bytes=max((card.peak_memory_bytes or 0 for card in cards), default=0) or None,
            energy_j=sampler.energy_j(0.0, now),
            training_energy_j=training_j,
            energy_per_trained_token_j=training_j / trained_tokens if training_j and trained_tokens else None,
            gpus=tuple(cards),
            host=_host(sampler),
            reason=self.reason or sampler.lost_reason,
        )


def start_watch(world: World, folder: Path, *, opener: Opener = open_source) -> Watch:
    """Start sampling this rank's process and, on the first rank, the cards of all ranks that this host has."""
    reason: str | None = None
    source: Source | None = None
    cards: list[Card] = []
    wanted = tuple(dict.fromkeys(each.identity for each in world.devices if each.kind == "cuda"))
    if not wanted:
        reason = "no GPU was used"
    else:
        try:
            source, known = opener()
            cards, missing = _on_this_host(known, wanted)
        except MonitorError as error:
            reason = f"monitor unavailable: {error.message}"
        else:
            reason = f"not on this host, or not told by the driver: {', '.join(missing)}" if missing else None
    sampler = Sampler(folder, source, cards)
    sampler.start()
    return Watch(sampler, reason)


def _on_this_host(known: list[Card], wanted: Sequence[str]) -> tuple[list[Card], list[str]]:
    found, missing = [], []
    for identity in wanted:
        try:
            found += select_cards(known, (identity,))
        except MonitorError:
            missing.append(identity)
    return found, missing


def _card(card: Card, series: CardSeries) -> CardMonitor:
    load, power, memory = (series.summary(name) for name in ("util_gpu", "power_draw_w", "memory_used_mib"))
    return CardMonitor(
        gpu_index=card.index,
        samples=series.samples,
        incomplete_samples=series.incomplete,
        mean_utilisation_percent=load.mean,
        peak_utilisation_percent=load.peak,
        mean_power_w=power.mean,
        peak_power_w=power.peak,
        peak_temperature_c=series.summary("temp_c").peak,
        peak_memory_bytes=None if memory.peak is None else round(memory.peak * _MIB),
    )


def _host(sampler: Sampler) -> HostMonitor | None:
    resident, busy, load = (series.summary() for series in sampler.host_series.values())
    if resident.mean is None or resident.peak is None:
        return None
    return HostMonitor(
        samples=resident.samples,
        mean_process_rss_bytes=round(resident.mean * _MIB),
        peak_process_rss_bytes=round(resident.peak * _MIB),
        mean_process_cpu_percent=busy.mean,
        mean_load=load.mean,
        peak_load=load.peak,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) / len(told) if told else None


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
