"""The report's figures: which series of a run stand in which chart, with a caption that says how they were drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from traceforge.evidence.charts import Chart, Line, Role, draw
from traceforge.evidence.formats import compact, duration, integer, size
from traceforge.evidence.run_record import EvaluationLine, RunRecord, UpdateLine
from traceforge.evidence.summaries import Series, series

_BYTES_PER_GIB = 1 << 30


@dataclass(frozen=True)
class LegendEntry:
    """What one line means. `kind` is how it is drawn: thin or strong line, dashes, or ticks on the axis."""

    role: Role
    kind: Literal["thin", "circle", "square", "dashes", "tick"]
    label: str


@dataclass(frozen=True)
class PageFigure:
    """A drawn chart. `wide` is the same chart for wide pages, where it has the whole width; None = `svg` always."""

    name: str
    title: str
    svg: str
    caption: str
    legend: tuple[LegendEntry, ...] = ()
    wide: str | None = None


def loss_figure(run: RunRecord) -> PageFigure | None:
    """Return the loss of every update and of both fixed sets, or None if there is none of them."""
    updates = _update_series(run, lambda line: line.loss)
    train = _evaluation_series([line for line in run.evaluations if line.set == "train"])
    held_out = _evaluation_series([line for line in run.evaluations if line.set == "evaluation"])
    skipped = [line.update for line in run.skipped_updates]
    candidates: list[tuple[Line, LegendEntry]] = [
        (Line("update", updates), LegendEntry("update", "thin", "each update, on its own samples")),
        (Line("train", train, "o", strong=True), LegendEntry("train", "circle", "fixed training samples")),
        (Line("held_out", held_out, "s", strong=True), LegendEntry("held_out", "square", "held-out samples")),
    ]
    present = [(line, entry) for line, entry in candidates if line.series.has_values]
    if not present:
        return None
    legend = [entry for _, entry in present]
    if skipped:
        legend.append(LegendEntry("limit", "tick", "skipped update"))
    of_pairs = any(line.margin is not None for line in (*run.updates, *run.evaluations))
    unit, mean = ("nats per pair", "Means over pairs") if of_pairs else ("nats per token", "Token-weighted")
    chart = Chart("loss", unit, tuple(line for line, _ in present), from_zero=False, marks=_spread(skipped))
    caption = [f"{mean}. The axis does not start at 0.", *_notes(updates), *_skipped_note(run)]
    return PageFigure(
        "loss", "Loss against updates", draw(chart, "half"), " ".join(caption), tuple(legend), draw(chart, "full")
    )


def learning_rate_figure(run: RunRecord) -> PageFigure | None:
    """Return the learning rate that each update was made with."""
    values = _update_series(run, lambda line: line.learning_rate)
    if not values.has_values:
        return None
    chart = Chart("learning-rate", "learning rate", (Line("train", values),))
    return PageFigure("learning-rate", "Learning rate", draw(chart, "half"), " ".join(_notes(values)))


def gradient_norm_figure(run: RunRecord) -> PageFigure | None:
    """Return the gradient norm of each update before clipping, with the norm it is clipped to."""
    values = _update_series(run, lambda line: line.gradient_norm)
    if not values.has_values:
        return None
    most = _clipping_norm(run)
    norms = [line.gradient_norm for line in run.applied_updates if line.gradient_norm is not None]
    clipped = None if most is None else sum(norm > most for norm in norms)
    highest = max(norms)
    near = most is not None and highest > most / 4
    chart = Chart("gradient-norm", "L2 norm", (Line("train", values),), log_if_wide=True, limit=most if near else None)
    caption = ["Of the whole update, before clipping.", *_notes(values)]
    if clipped is not None:
        verb = "was" if clipped == 1 else "were"
        caption.insert(1, f"{integer(clipped)} of {integer(len(norms))} updates {verb} clipped to {compact(most)}.")
    legend = (LegendEntry("limit", "dashes", "clipped to this norm"),) if near else ()
    return PageFigure("gradient-norm", "Gradient norm", draw(chart, "half"), " ".join(caption), legend)


def seconds_figure(run: RunRecord, *, median: float | None) -> PageFigure | None:
    """Return the wall time of each update, with their median."""
    values = _update_series(run, lambda line: line.seconds)
    if not values.has_values:
        return None
    chart = Chart("seconds", "seconds", (Line("train", values),), limit=median)
    legend = (LegendEntry("limit", "dashes", f"median, {duration(median)}"),)
    caption = ["Wall time from planning its rows to the changed weights, evaluations not included.", *_notes(values)]
    return PageFigure("seconds", "Update times", draw(chart, "half"), " ".join(caption), legend, draw(chart, "strip"))


def memory_figure(run: RunRecord, *, where: str) -> PageFigure | None:
    """Return the peak memory recorded with each update; `where` says whose memory it is."""
    values = _update_series(run, lambda line: None if line.peak_bytes is None else line.peak_bytes / _BYTES_PER_GIB)
    if not values.has_values:
        return None
    highest = max(line.peak_bytes for line in run.applied_updates if line.peak_bytes is not None)
    chart = Chart("memory", "GiB", (Line("train", values),))
    caption = [
        f"Highest {where} memory since the start, as of each update; {size(highest)} in the end.",
        *_notes(values),
    ]
    return PageFigure("memory", "Peak memory", draw(chart, "half"), " ".join(caption), wide=draw(chart, "strip"))


def margin_figure(run: RunRecord) -> PageFigure | None:
    """Return the reward margin of each update's pairs and of both fixed sets."""
    return _course_figure(
        run, "margin", "Reward margin", "reward", lambda line: line.margin, "Chosen reward less rejected reward."
    )


def accuracy_figure(run: RunRecord) -> PageFigure | None:
    """Return the share of pairs whose chosen side scores higher, for each update and both fixed sets."""
    return _course_figure(
        run, "accuracy", "Preference accuracy", "share of pairs", lambda line: line.accuracy,
        "Pairs whose chosen side has the higher reward. 0.5 is chance.",
    )  # fmt: skip


def sides_figure(run: RunRecord) -> PageFigure | None:
    """Return the mean log-probability of both sides of the held-out pairs, or of the training pairs without such."""
    name = "evaluation" if any(line.set == "evaluation" for line in run.evaluations) else "train"
    lines = [line for line in run.evaluations if line.set == name]
    measured_at = [line.update for line in lines]
    chosen = series(measured_at, [line.chosen_logp for line in lines])
    rejected = series(measured_at, [line.rejected_logp for line in lines])
    if not (chosen.has_values and rejected.has_values):
        return None
    chart = Chart(
        "sides",
        "nats per trained token",
        (Line("chosen", chosen, "o", strong=True), Line("rejected", rejected, "s", strong=True)),
        from_zero=False,
    )
    legend = (LegendEntry("chosen", "circle", "chosen side"), LegendEntry("rejected", "square", "rejected side"))
    which = "held-out" if name == "evaluation" else "training"
    caption = f"Mean log-probability of the {which} pairs, length-normalised. The axis does not start at 0."
    return PageFigure("sides", "Both sides", draw(chart, "half"), caption, legend)


def _course_figure(
    run: RunRecord,
    name: str,
    title: str,
    label: str,
    value: Callable[[UpdateLine | EvaluationLine], float | None],
    caption: str,
) -> PageFigure | None:
    """Return a quantity against updates: of each update, and of both fixed sets."""
    updates = _update_series(run, value)
    sets = {
        each: series(
            [line.update for line in run.evaluations if line.set == each],
            [value(line) for line in run.evaluations if line.set == each],
        )
        for each in ("train", "evaluation")
    }
    candidates: list[tuple[Line, LegendEntry]] = [
        (Line("update", updates), LegendEntry("update", "thin", "each update's pairs")),
        (Line("train", sets["train"], "o", strong=True), LegendEntry("train", "circle", "fixed training pairs")),
        (Line("held_out", sets["evaluation"], "s", strong=True), LegendEntry("held_out", "square", "held-out pairs")),
    ]
    present = [(line, entry) for line, entry in candidates if line.series.has_values]
    if not present:
        return None
    chart = Chart(name, label, tuple(line for line, _ in present), from_zero=False)
    words = " ".join([caption, *_notes(updates)])
    return PageFigure(name, title, draw(chart, "half"), words, tuple(entry for _, entry in present))


def _update_series(run: RunRecord, value: Callable[[UpdateLine], float | None]) -> Series:
    lines = run.applied_updates
    return series([line.update for line in lines], [value(line) for line in lines])


def _evaluation_series(lines: Sequence[EvaluationLine]) -> Series:
    return series([line.update for line in lines], [line.loss for line in lines])


def _notes(drawn: Series) -> list[str]:
    notes = []
    if drawn.updates_per_point > 1:
        notes.append(
            f"Each point averages {integer(drawn.updates_per_point)} updates; "
            "the band spans their lowest and highest value."
        )
    if drawn.num_non_finite:
        notes.append(f"{integer(drawn.num_non_finite)} values are missing or not finite and leave a gap.")
    return notes


def _skipped_note(run: RunRecord) -> list[str]:
    count = len(run.skipped_updates)
    if not count:
        return []
    verb = "update was" if count == 1 else "updates were"
    return [
        f"{integer(count)} {verb} skipped: the gradient was not finite, so nothing changed and the count stood still."
    ]


def _spread(marks: Sequence[int], most: int = 300) -> list[float]:
    """Return the marks, at most `most` of them; thousands of ticks on one axis say no more than a few hundred."""
    distinct = sorted(set(marks))
    stride = max(1, -(-len(distinct) // most))
    return [float(mark) for mark in distinct[::stride]]


def _clipping_norm(run: RunRecord) -> float | None:
    optimizer = (run.config or {}).get("optimizer")
    most = optimizer.get("max_gradient_norm") if isinstance(optimizer, dict) else None
    return float(most) if isinstance(most, (int, float)) and not isinstance(most, bool) else None
