"""Charts as inline SVG that takes its colours from the page.

Colours  Each role is drawn in a colour that nothing else uses and is then replaced by a CSS custom property, so one
         drawing serves light, dark and print. Text stays text, in the page's own font.
Alike    The same values give the same bytes: no date, no random ids.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from traceforge.evidence.summaries import FloatArray, Series

Role = Literal["text", "grid", "train", "held_out", "update", "limit", "chosen", "rejected"]
Shape = Literal["half", "full", "strip"]

_COLOURS: dict[Role, str] = {
    "text": "#010203",
    "grid": "#010204",
    "train": "#010205",
    "held_out": "#010206",
    "update": "#010207",
    "limit": "#010208",
    "chosen": "#010209",
    "rejected": "#01020a",
}
_INCHES: dict[Shape, tuple[float, float]] = {"half": (4.7, 2.5), "full": (10.4, 3.3), "strip": (10.4, 2.3)}
_LOG_ABOVE_RATIO = 50
_FEW_POINTS = 60

_STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "path.simplify": False,
    "text.color": _COLOURS["text"],
    "axes.edgecolor": _COLOURS["grid"],
    "axes.labelcolor": _COLOURS["text"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": _COLOURS["grid"],
    "grid.linewidth": 0.6,
    "xtick.color": _COLOURS["grid"],
    "ytick.color": _COLOURS["grid"],
    "xtick.labelcolor": _COLOURS["text"],
    "ytick.labelcolor": _COLOURS["text"],
    "ytick.major.size": 0,
}


@dataclass(frozen=True)
class Line:
    """One line of a chart. `strong` draws it thicker; markers are left out where they would run together."""

    role: Role
    series: Series
    marker: str = "."
    strong: bool = False


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Args:
        name: unique in the page; also makes the ids inside it unique.
        y_label: quantity and unit.
        lines: from back to front.
        from_zero: the vertical axis starts at 0, as it must for a ratio quantity.
        log_if_wide: use a logarithmic axis where the values span more than a factor of 50.
        limit: a horizontal dashed line, such as the clipping norm.
        marks: updates to mark on the horizontal axis: the skipped ones.
    """

    name: str
    y_label: str
    lines: tuple[Line, ...]
    from_zero: bool = True
    log_if_wide: bool = False
    limit: float | None = None
    marks: Sequence[float] = ()


def draw(chart: Chart, shape: Shape) -> str:
    """Return the chart as one `<svg>` element without size, script, link, metadata or fixed colour."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": f"{chart.name}-{shape}"}):
        figure = Figure(figsize=_INCHES[shape], layout="constrained")
        axes = figure.add_subplot()
        for line in chart.lines:
            _draw_line(axes, line)
        _set_axes(axes, chart)
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return _for_page(buffer.getvalue(), prefix=f"{chart.name}-{shape}")


def _draw_line(axes: Any, line: Line) -> None:
    drawn, colour = line.series, _COLOURS[line.role]
    if drawn.updates_per_point > 1:
        axes.fill_between(drawn.updates, drawn.low, drawn.high, color=colour, alpha=0.25, linewidth=0)
    axes.plot(
        drawn.updates,
        drawn.mean,
        color=colour,
        linewidth=1.7 if line.strong else 1.0,
        marker=line.marker if len(drawn.updates) <= _FEW_POINTS else "",
        markersize=4.5,
    )


def _set_axes(axes: Any, chart: Chart) -> None:
    axes.set_xlabel("update")
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    values = _all_values(chart)
    if chart.log_if_wide and values.size and values.min() > 0 and values.max() > _LOG_ABOVE_RATIO * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
        axes.tick_params(axis="y", which="minor", length=0)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if chart.from_zero:
            axes.set_ylim(0, 1.08 * max(values.max(initial=0), chart.limit or 0) or 1)
    if chart.limit is not None:
        axes.axhline(chart.limit, color=_COLOURS["limit"], linewidth=1.0, linestyle=(0, (4, 3)))
    if len(chart.marks):
        axes.plot(
            chart.marks,
            np.zeros(len(chart.marks)),
            color=_COLOURS["limit"],
            transform=axes.get_xaxis_transform(),
            marker="|",
            markersize=9,
            markeredgewidth=1.4,
            linestyle="",
            clip_on=False,
        )


def _tick(value: float) -> str:
    """Return a tick's label: `1,500`, `0.25`, `5e-5`."""
    if value == 0 or abs(value) >= 0.001:
        return f"{value:,.6g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _all_values(chart: Chart) -> FloatArray:
    parts = [bounds for line in chart.lines for bounds in (line.series.low, line.series.high)]
    values = np.concatenate(parts) if parts else np.zeros(0)
    return values[np.isfinite(values)]


def _for_page(svg: str, *, prefix: str) -> str:
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<defs>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg [^>]*?)\s(?:width="[^"]*"\sheight="[^"]*"|height="[^"]*"\swidth="[^"]*")', r"\1", svg, count=1)
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    referenced = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r'\sid="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in referenced else "", svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font(-family)?: ?([\d.]+px )?[^;\"]*DejaVu[^;\"]*;?", _only_size, svg)
    for role, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--chart-{role.replace('_', '-')})")
    # Two decimals of a pixel are plenty, in coordinates; text is left alone.
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag[0]), svg)
    return re.sub(r"\s*\n\s*", " ", re.sub(r">\s+<", "><", svg))


def _only_size(found: re.Match[str]) -> str:
    return f"font-size: {found[2].strip()};" if found[2] else ""
