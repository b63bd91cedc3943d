"""Sums over samples: means and peaks of what was told, and energy as the integral of power.

Mean     over the samples that have the value, for each card apart. A value that is missing counts as nothing, not as 0.
Energy   straight lines between the samples that have a power, cut at the window asked for. Before the first and after
         the last such sample nothing is assumed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise

from traceforge.monitor.readings import FIELDS, Reading


@dataclass(frozen=True)
class Summary:
    """Mean and peak of one quantity; None = no sample had it."""

    mean: float | None
    peak: float | None
    samples: int


class Series:
    """The samples of one quantity, as sums."""

    def __init__(self) -> None:
        self._sum, self._peak, self._count = 0.0, float("-inf"), 0

    def add(self, value: float | None) -> None:
        """Count one sample."""
        if value is not None:
            self._sum += value
            self._peak = max(self._peak, value)
            self._count += 1

    def summary(self) -> Summary:
        """Return what the samples so far come to."""
        if not self._count:
            return Summary(None, None, 0)
        return Summary(self._sum / self._count, self._peak, self._count)


class CardSeries:
    """All samples of one card."""

    def __init__(self) -> None:
        self._series = {name: Series() for name in FIELDS}
        self._moments, self._powers = array("d"), array("d")
        self.samples = 0
        self.incomplete = 0
        """Samples in which at least one value was missing."""

    def add(self, moment: float, reading: Reading) -> None:
        """Count a reading taken at `moment`, in seconds of a clock that never goes back."""
        values = [getattr(reading, name) for name in FIELDS]
        for series, value in zip(self._series.values(), values, strict=True):
            series.add(value)
        if reading.power_draw_w is not None:
            self._moments.append(moment)
            self._powers.append(reading.power_draw_w)
        self.samples += 1
        self.incomplete += None in values

    def summary(self, name: str) -> Summary:
        """Return mean and peak of a column of gpu.csv."""
        return self._series[name].summary()

    def energy_j(self, start: float, stop: float) -> float | None:
        """Return the joules drawn from `start` to `stop`; None if power was not told at least twice around there."""
        moments, powers = self._moments, self._powers
        if len(moments) < 2:
            return None
        start, stop = max(start, moments[0]), min(stop, moments[-1])
        if start >= stop:
            return None
        inside = range(bisect_right(moments, start), bisect_left(moments, stop))
        points = [(start, self._power_at(start)), *((moments[i], powers[i]) for i in inside)]
        points.append((stop, self._power_at(stop)))
        return sum((b - a) * (p + q) / 2 for (a, p), (b, q) in pairwise(points))

    def _power_at(self, moment: float) -> float:
        after = min(max(bisect_left(self._moments, moment), 1), len(self._moments) - 1)
        a, b = self._moments[after - 1], self._moments[after]
        share = (moment - a) / (b - a) if b > a else 0.0
        return self._powers[after - 1] + share * (self._powers[after] - self._powers[after - 1])
