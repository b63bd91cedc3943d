"""The record of a comparison as a table of plain text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from traceforge.oracles.record import ConformanceRecord, loss_size, reward_size

_LOGGED = {
    "chosen_logp": ("chosen log-prob", "log_prob_nats"),
    "rejected_logp": ("rejected log-prob", "log_prob_nats"),
    "chosen_reward": ("chosen reward", "reward_relative"),
    "rejected_reward": ("rejected reward", "reward_relative"),
    "margin": ("reward margin", "reward_relative"),
    "accuracy": ("preference accuracy", None),
}


class _Line(NamedTuple):
    """One figure of both sides; `difference` is measured as its tolerance says."""

    name: str
    ours: str = ""
    theirs: str = ""
    difference: float | None = None
    allowed: float | None = None

    def cells(self) -> tuple[str, ...]:
        verdict = ""
        if self.difference is not None and self.allowed is not None:
            verdict = "agrees" if self.difference <= self.allowed else "DIFFERS"
        return (self.name, self.ours, self.theirs, _short(self.difference), _short(self.allowed), verdict)


def comparison_text(record: ConformanceRecord) -> str:
    """Return what was compared, every figure with its difference and tolerance, and the verdict."""
    figures = record.figures
    table = [
        ("figure", "this project", figures["oracle"], "difference", "allowed", ""),
        *(line.cells() for line in _lines(record)),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ["  ".join(_aligned(row, widths)).rstrip() for row in table]
    failed = record.failed_checks
    verdict = (
        f"they agree: all {len(record.checks)} checks passed"
        if not failed
        else f"they DISAGREE in {len(failed)} of {len(record.checks)} checks: {', '.join(failed)}"
    )
    return "\n".join([*_preamble(figures), "", *rows, "", verdict])


def _preamble(figures: Mapping[str, Any]) -> Iterator[str]:
    sizes = ", ".join(str(len(items)) for items in figures["update_items"])
    dtype = figures["dtype"]
    things = "pairs" if figures["logged"]["ours"] else "samples"
    yield (
        f"{figures['model']['id']}: same tokens, masks, initial weights and optimizer; updates of {sizes} {things}, "
        f"{dtype['compared']} on {figures['device']}, {figures['layout']}"
    )
    if dtype["run_file"] != dtype["compared"]:
        yield f"the run file says {dtype['run_file']}; {dtype['compared']} on both sides, or rounding would hide errors"
    if figures["oracle_overrides"]:
        yield f"planted for {figures['oracle']} alone: {', '.join(figures['oracle_overrides'])}"


def _lines(record: ConformanceRecord) -> Iterator[_Line]:
    figures, allowed = record.figures, record.tolerances
    preference = bool(figures["logged"]["ours"])
    for number, ours, theirs in _both(figures, "losses"):
        logged = figures["logged"]["theirs"][number] if preference else None
        tolerance = allowed["loss_relative_to_reward" if preference else "loss_nats"]
        yield _line(f"update {number + 1}: loss", ours, theirs, loss_size(theirs, logged), tolerance)
        if logged is not None:
            yield from _logged_lines(figures["logged"]["ours"][number], logged, allowed)
        mine, other = (figures["gradient_norms"][side][number] for side in ("ours", "theirs"))
        yield _line("  gradient norm", mine, other, abs(other) or 1.0, allowed["gradient_norm_relative"])
    yield _Line(
        "gradient of update 1, relative L2",
        difference=figures["first_gradient_relative_l2"],
        allowed=allowed["gradient_relative_l2"],
    )
    yield _Line(
        "weight changes, all, relative L2",
        difference=figures["weight_change_of_all_relative_l2"],
        allowed=allowed["weight_change_of_all_relative_l2"],
    )
    yield _Line(
        "weight changes, worst tensor, relative L2",
        difference=figures["worst_weight_change_relative_l2"],
        allowed=allowed["weight_change_relative_l2"],
    )
    seconds, peaks = figures["seconds"], figures["peak_bytes"]
    yield _Line("seconds an update, median", _seconds(seconds["ours"]), _seconds(seconds["theirs"]))
    yield _Line("peak memory above the start, MiB", _mebibytes(peaks["ours"]), _mebibytes(peaks["theirs"]))


def _logged_lines(
    ours: Mapping[str, float], theirs: Mapping[str, float], allowed: Mapping[str, float]
) -> Iterator[_Line]:
    for key, (name, tolerance) in _LOGGED.items():
        scale = reward_size(theirs) if tolerance == "reward_relative" else 1.0
        yield _line(f"  {name}", ours[key], theirs[key], scale, allowed[tolerance] if tolerance else 1e-6)


def _line(name: str, ours: float, theirs: float, scale: float, allowed: float) -> _Line:
    return _Line(name, f"{ours:.6f}", f"{theirs:.6f}", abs(ours - theirs) / scale, allowed)


def _both(figures: Mapping[str, Any], name: str) -> Iterator[tuple[int, float, float]]:
    pairs: Sequence[tuple[float, float]] = list(zip(figures[name]["ours"], figures[name]["theirs"], strict=False))
    for number, (ours, theirs) in enumerate(pairs):
        yield number, ours, theirs


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if place in {0, len(row) - 1} else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "no update"


def _mebibytes(value: int | None) -> str:
    return "not measured" if value is None else f"{value / 2**20:,.0f}"
