"""Charts read back: the points in the SVG are the values of the run, up to the axis' scale."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from example_runs import finished_run

from traceforge.evidence.charts import Chart, Line, draw
from traceforge.evidence.figures import gradient_norm_figure, learning_rate_figure, loss_figure
from traceforge.evidence.run_record import load_run
from traceforge.evidence.summaries import series


def polyline(svg: str, role: str) -> np.ndarray:
    """Return the corners [P, 2] of the longest unfilled line of a role."""
    lines = []
    for path in ET.fromstring(svg).iter():
        style = path.get("style", "")
        if path.tag.endswith("path") and f"stroke: var(--chart-{role})" in style and "fill: none" in style:
            numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path.get("d", ""))]
            lines.append(np.array(numbers).reshape(-1, 2))
    return max(lines, key=len)


def misfit(drawn: np.ndarray, values: list[float]) -> float:
    """Return the largest distance in points between drawn heights and the best linear scale of the values."""
    scale = np.polyfit(values, drawn, 1)
    return float(np.abs(np.polyval(scale, values) - drawn).max())


def test_the_drawn_points_are_the_recorded_losses(tmp_path: Path) -> None:
    run = load_run(finished_run(tmp_path))
    figure = loss_figure(run)
    assert figure is not None
    corners = polyline(figure.svg, "update")
    losses = [line.loss for line in run.applied_updates if line.loss is not None]
    assert misfit(corners[:, 1], losses) < 0.02
    assert misfit(corners[:, 0], [line.update for line in run.applied_updates]) < 0.02
    losses[30] += 0.05  # the oracle itself: a wrong value does not fit
    assert misfit(corners[:, 1], losses) > 0.5


def test_one_wrong_value_changes_the_chart_and_the_same_values_do_not(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    first = loss_figure(load_run(run))
    again = loss_figure(load_run(run))
    text = (run / "updates.jsonl").read_text()
    loss = re.search(r'"loss": ([\d.]+)', text)
    assert loss is not None
    (run / "updates.jsonl").write_text(text.replace(loss[1], str(float(loss[1]) + 0.3), 1))
    changed = loss_figure(load_run(run))
    assert first is not None
    assert again is not None
    assert changed is not None
    assert first.svg == again.svg
    assert first.svg != changed.svg
    assert first.wide != changed.wide


def test_a_skipped_update_is_a_mark_and_not_a_point(tmp_path: Path) -> None:
    with_skip = loss_figure(load_run(finished_run(tmp_path, skipped=(23,))))
    without = loss_figure(load_run(finished_run(tmp_path, skipped=())))
    assert with_skip is not None
    assert without is not None
    rates = learning_rate_figure(load_run(tmp_path / "demo"))
    assert rates is not None
    assert len(polyline(with_skip.svg, "update")) == len(polyline(rates.svg, "train")) == 60
    assert "1 update was skipped" in with_skip.caption
    assert "skipped" not in without.caption
    assert any(entry.kind == "tick" for entry in with_skip.legend)


def test_clipped_updates_are_counted_against_the_setting(tmp_path: Path) -> None:
    run = load_run(finished_run(tmp_path))
    above = sum(line.gradient_norm > 1.0 for line in run.applied_updates if line.gradient_norm is not None)
    figure = gradient_norm_figure(run)
    assert figure is not None
    assert f"{above} of 60 updates were clipped to 1." in figure.caption


def test_small_numbers_keep_their_digits_on_the_axis(tmp_path: Path) -> None:
    figure = learning_rate_figure(load_run(finished_run(tmp_path)))
    assert figure is not None
    labels = re.findall(r">([^<>]+)</text>", figure.svg)
    assert {"0", "5e-5", "1e-4", "2e-4"} <= set(labels)
    values = series(range(5), [0.0, 0.001, 0.002, 0.003, 0.004])
    labels = re.findall(r">([^<>]+)</text>", draw(Chart("small", "y", (Line("train", values),)), "half"))
    assert {"0.001", "0.002", "0.004"} <= set(labels)


@pytest.mark.parametrize("values", [[1.0], [1.0, None, 2.0], [0.0, 0.0], [5.0] * 3, [1e-9, 1e9], [None, None]])
def test_odd_values_are_drawn_without_complaint(values: list[float | None]) -> None:
    chart = Chart("odd", "y", (Line("train", series(range(1, len(values) + 1), values)),), log_if_wide=True)
    svg = draw(chart, "half")
    assert "nan" not in svg.lower()
    ET.fromstring(svg)


def test_a_gap_stays_a_gap() -> None:
    chart = Chart("gap", "y", (Line("train", series([1, 2, 3, 4, 5], [1.0, 2.0, math.nan, 2.0, 1.0]), marker=""),))
    line = next(path for path in re.findall(r'd="([^"]+)"[^>]*--chart-train', draw(chart, "half")) if "L" in path)
    assert line.count("M") == 2


def test_charts_have_no_colour_size_or_link_of_their_own(tmp_path: Path) -> None:
    figure = loss_figure(load_run(finished_run(tmp_path)))
    assert figure is not None
    for svg in (figure.svg, str(figure.wide)):
        assert not re.findall(r"#[0-9a-fA-F]{6}\b", svg)
        assert not re.search(r"<svg[^>]*\s(width|height)=", svg)
        assert "http" not in svg
        assert "<style" not in svg
    identifiers = re.findall(r'\sid="([^"]+)"', figure.svg + str(figure.wide))
    assert len(identifiers) == len(set(identifiers))
