"""Series and figures of a run's updates: quantiles, speed, and downsampling that says what it did.

Quantile  The median is the usual one (of two middle values, their mean); the 95th percentile is by nearest rank.
Points    More updates than points are averaged in equal runs of updates; each point keeps its lowest and highest
          value, so no spike disappears from a chart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traceforge.evidence.run_record import UpdateLine

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """Values against updates, ready to draw.

    Args:
        updates: middle of each point's run of updates.
        mean, low, high: mean, lowest and highest finite value of the run; NaN where it has none.
        updates_per_point: 1 = every update is drawn.
        num_non_finite: values left out because they were not finite.
    """

    updates: FloatArray
    mean: FloatArray
    low: FloatArray
    high: FloatArray
    updates_per_point: int
    num_non_finite: int

    @property
    def has_values(self) -> bool:
        """Whether there is anything to draw."""
        return bool(np.isfinite(self.mean).any())


@dataclass(frozen=True)
class UpdateSummary:
    """What the updates were like. `updates` counts applied ones; the figures that are None had nothing to go by.

    `last_update` is the clock in the end: above `updates` in a run that went on from another one.
    """

    updates: int
    last_update: int
    skipped: int
    median_s: float | None
    p95_s: float | None
    total_s: float
    row_tokens: int
    trained_tokens: int
    row_tokens_per_s: float | None
    trained_tokens_per_s: float | None
    peak_bytes: int | None


def percentile_95(values: Sequence[float]) -> float | None:
    """Return the smallest value that at least 95 % of `values` do not exceed, or None of none."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else None


def summarize_updates(updates: Sequence[UpdateLine]) -> UpdateSummary:
    """Return the summary of a run's updates.

    The quantiles are of applied updates; totals and speeds count the skipped ones too, for their time was spent.
    """
    seconds = [line.seconds for line in updates if line.seconds is not None and not line.skipped]
    total = math.fsum(line.seconds for line in updates if line.seconds is not None)
    row_tokens = sum(line.row_tokens for line in updates)
    trained_tokens = sum(line.trained_tokens for line in updates)
    peaks = [line.peak_bytes for line in updates if line.peak_bytes is not None]
    skipped = sum(line.skipped for line in updates)
    return UpdateSummary(
        updates=len(updates) - skipped,
        last_update=max((line.update for line in updates if not line.skipped), default=0),
        skipped=skipped,
        median_s=statistics.median(seconds) if seconds else None,
        p95_s=percentile_95(seconds),
        total_s=total,
        row_tokens=row_tokens,
        trained_tokens=trained_tokens,
        row_tokens_per_s=row_tokens / total if total else None,
        trained_tokens_per_s=trained_tokens / total if total else None,
        peak_bytes=max(peaks, default=None),
    )


def series(updates: Sequence[int], values: Sequence[float | None], *, most_points: int = 500) -> Series:
    """Return `values` (None = not finite) against `updates`, in at most `most_points` points."""
    x = np.asarray(updates, dtype=np.float64)
    y = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    y[~np.isfinite(y)] = math.nan
    per_point = max(1, math.ceil(len(y) / most_points))
    starts = range(0, len(y), per_point)
    parts = [y[start : start + per_point] for start in starts]
    return Series(
        updates=np.array([x[start : start + per_point].mean() for start in starts], dtype=np.float64),
        mean=np.array([_over_finite(np.mean, part) for part in parts], dtype=np.float64),
        low=np.array([_over_finite(np.min, part) for part in parts], dtype=np.float64),
        high=np.array([_over_finite(np.max, part) for part in parts], dtype=np.float64),
        updates_per_point=per_point,
        num_non_finite=int(np.isnan(y).sum()),
    )


def _over_finite(reduce: np.ufunc | object, part: FloatArray) -> float:
    finite = part[np.isfinite(part)]
    return float(reduce(finite)) if finite.size else math.nan  # type: ignore[operator]
