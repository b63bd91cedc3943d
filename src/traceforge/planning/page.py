"""The plan as one self-contained page: the picture, the tables, no script and no network.

The picture is a dumbbell chart. Each line is a technique: the left dot is the planned peak, the right one the peak with
that technique turned off. The axis is logarithmic, because techniques differ by orders of magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import traceforge
import traceforge.samples
from traceforge.evidence.storage import write_whole
from traceforge.pages import page_environment
from traceforge.planning.ledger import PARTS
from traceforge.planning.plan import Plan
from traceforge.planning.rates import Estimate
from traceforge.planning.views import count, describe, gib, textbook_parts, verdict

_GIB = 2**30
_FOLDERS = (Path(__file__).parent / "templates", Path(traceforge.samples.__file__).parent / "templates")


@dataclass(frozen=True)
class Dumbbell:
    """One line of the picture; `left` and `right` are percent of the axis."""

    label: str
    left: float
    right: float
    value: str


@dataclass(frozen=True)
class Picture:
    """A dumbbell chart. `ticks`: (percent, label). `limit`: percent where the machine ends, None = beyond the axis."""

    lines: tuple[Dumbbell, ...]
    ticks: tuple[tuple[float, str], ...]
    limit: float | None
    limit_label: str


def picture_of(plan: Plan) -> Picture:
    """Return where dots and ticks of the chart lie."""
    on_card = plan.setup.device == "cuda"
    planned = plan.ledger.peak.total
    sizes = {each.technique: each.device_bytes if on_card else each.host_bytes for each in plan.without}
    sizes["any technique (textbook)"] = plan.textbook.total
    low, high = min(planned, *sizes.values()), max(planned, *sizes.values())
    first, last = math.floor(math.log2(low / _GIB)), math.ceil(math.log2(high / _GIB))
    last = max(last, first + 1)

    def place(size: float) -> float:
        return 100 * (math.log2(size / _GIB) - first) / (last - first)

    every = -(-(last - first) // 7)
    limit = plan.budget.device_bytes if on_card else plan.budget.host_bytes
    seen = limit is not None and 0 <= place(limit) <= 100
    return Picture(
        lines=tuple(
            Dumbbell(f"without {name}", round(place(planned), 2), round(place(size), 2), f"{gib(size)} GiB")
            for name, size in sorted(sizes.items(), key=lambda item: item[1])
        ),
        ticks=tuple(
            (round(100 * (power - first) / (last - first), 2), _tick(power)) for power in range(first, last + 1, every)
        ),
        limit=round(place(limit), 2) if seen and limit is not None else None,
        limit_label="" if limit is None else f"{'card' if on_card else 'host'} of {limit / _GIB:g} GiB",
    )


def _tick(power: int) -> str:
    size = 2.0**power
    return f"{size:g} GiB" if size < 1024 else f"{size / 1024:g} TiB"


def write_page(plan: Plan, path: Path, *, title: str, estimate: Estimate | None = None) -> None:
    """Write the page to `path`.

    Raises:
        StorageError: it cannot be written.
    """
    book, parts = textbook_parts(plan), plan.ledger.peak.parts
    rows = [(part, gib(parts.get(part, 0)), gib(book.get(part, 0))) for part in PARTS if part in parts or part in book]
    text = (
        page_environment(*_FOLDERS)
        .get_template("plan.html.j2")
        .render(
            plan=plan,
            title=title,
            verdict=verdict(plan),
            rows=[*rows, ("in all", gib(plan.ledger.peak.total), gib(plan.textbook.total))],
            picture=picture_of(plan),
            parameters=count(plan.shape.parameters()),
            text=describe(plan, title=title, estimate=estimate),
            version=traceforge.__version__,
        )
    )
    write_whole(path, text.encode())
