"""Figures of updates against arithmetic by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from traceforge.evidence.run_record import UpdateLine
from traceforge.evidence.summaries import percentile_95, series, summarize_updates


def line(update: int, seconds: float, *, skipped: bool = False) -> UpdateLine:
    return UpdateLine(update, 1, 4, 10, 100, 1.0, 1e-4, 0.5, seconds, 1.0, 7 + update, skipped)


def test_skipped_updates_cost_time_but_are_no_updates() -> None:
    found = summarize_updates([line(1, 4.0), line(2, 8.0, skipped=True), line(2, 1.0), line(3, 2.0)])
    assert (found.updates, found.skipped, found.median_s, found.p95_s) == (3, 1, 2.0, 4.0)
    assert found.total_s == 15.0
    assert (found.row_tokens, found.trained_tokens) == (400, 40)
    assert found.row_tokens_per_s == pytest.approx(400 / 15)
    assert found.peak_bytes == 10


def test_no_updates_have_no_figures() -> None:
    found = summarize_updates([])
    assert (found.updates, found.median_s, found.p95_s, found.row_tokens_per_s) == (0, None, None, None)


def test_the_95th_percentile_is_the_nearest_rank() -> None:
    assert percentile_95([float(value) for value in range(1, 101)]) == 95.0
    assert percentile_95([float(value) for value in range(1, 21)]) == 19.0
    assert percentile_95([3.0]) == 3.0
    assert percentile_95([]) is None


def test_few_values_are_drawn_as_they_are() -> None:
    found = series([1, 2, 4], [3.0, None, 5.0])
    assert found.updates.tolist() == [1, 2, 4]
    assert found.updates_per_point == 1
    assert found.num_non_finite == 1
    assert (found.mean[0], math.isnan(found.mean[1]), found.mean[2]) == (3.0, True, 5.0)


def test_averaged_points_keep_every_spike_and_the_overall_mean() -> None:
    noise = random.Random(3)
    values = [noise.random() for _ in range(100_000)]
    values[54_321] = 99.0
    values[11] = -99.0
    found = series(range(1, 100_001), values, most_points=500)
    assert len(found.mean) == 500
    assert found.updates_per_point == 200
    assert (found.high.max(), found.low.min()) == (99.0, -99.0)
    assert np.mean(found.mean) == pytest.approx(sum(values) / len(values))
    assert found.updates[0] == 100.5


def test_a_point_whose_values_are_all_broken_is_a_gap() -> None:
    found = series(range(1, 5), [1.0, 3.0, None, math.inf], most_points=2)
    assert found.mean[0] == 2.0
    assert math.isnan(found.mean[1])
    assert found.num_non_finite == 2
