"""How an inspection of pairs looks: on a terminal, in a pipe, and as one self-contained page.

Mask and escapes are those of `inspection_views.py`. The prompt stands once, then the two endings, chosen first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from traceforge.samples.inspection_views import (
    closing_lines,
    counted,
    excerpt,
    masked_text,
    print_histogram,
    visible,
    write_page,
)
from traceforge.samples.tree_views import factor

if TYPE_CHECKING:
    from traceforge.samples.pair_inspection import PairInspection, PairLine, SideView
    from traceforge.samples.statistics import Lengths, PairStatistics

MOST_LINES = 12
MOST_ROWS = 500
_ID_CELLS = 44


def print_pair_inspection(inspection: PairInspection, console: Console) -> None:
    """Print numbers and both sides of the pair; colour or brackets show the mask."""
    for label, value in pair_summary_lines(inspection):
        console.print(Text(f"{label:<22}", style="dim"), Text(value), sep="", soft_wrap=True)
    print_histogram(inspection.histogram, console)
    console.print()
    for line in _table(inspection):
        console.print(Text(visible(line)), soft_wrap=True)
    coloured = console.is_terminal and not console.no_color
    view = inspection.pair
    console.print()
    cuts = f" · cut: {', '.join(view.cuts)}" if view.cuts else ""
    heading = f"pair {view.index}: {view.line.pair_id} · task {view.line.task_id}{cuts}"
    console.print(Text(visible(heading), style="bold"), soft_wrap=True)
    mask = "green and bold" if coloured else "between ⟦ and ⟧"
    _print_heading(f"prompt, the same on both sides · trained below ({mask})", console)
    way_to_all = f"--sample {view.index}"
    prompt = visible(view.prompt)
    console.print(Text(prompt if inspection.whole_text else excerpt(prompt, way_to_all)), soft_wrap=True)
    for name, side in (("chosen", view.chosen), ("rejected", view.rejected)):
        _print_heading(f"{name} · {side_heading(side)}", console)
        for number, sequence in enumerate(side.sequences, start=1):
            if len(side.sequences) > 1:
                console.print(Text(sequence_heading(side, number), style="dim"), soft_wrap=True)
            text = masked_text(sequence.segments, coloured=coloured, whole=inspection.whole_text, way_to_all=way_to_all)
            console.print(text, soft_wrap=True)


def write_pair_inspection_html(inspection: PairInspection, path: Path) -> None:
    """Write the same as one self-contained page: no script, no request, light and dark, made to be printed too.

    Raises:
        StorageError: the file cannot be written; nothing half-written is left.
    """
    filters: dict[str, Callable[..., object]] = {
        "side_heading": side_heading,
        "sequence_heading": sequence_heading,
        "logp": _logp,
    }
    write_page(
        "pair_inspection.html.j2",
        path,
        filters,
        inspection=inspection,
        summary=pair_summary_lines(inspection),
        widest=max(count for _, _, count in inspection.histogram),
        refusals=inspection.statistics.refusals,
        lines=inspection.lines[:MOST_ROWS],
    )


def pair_summary_lines(inspection: PairInspection) -> list[tuple[str, str]]:
    """Return what both views say about the whole set, as label and text."""
    settings, held = inspection.settings, inspection.statistics
    numbers, pairs = held.train, held.train.pairs
    assert pairs is not None, "statistics of pairs"
    made = " of random words, made for trials" if held.sources[0].kind == "synthetic_pairs" else ""
    lines = [
        ("data set", inspection.path),
        ("model", inspection.model),
        (
            "rendering",
            f"{settings.rendering}, target {settings.target}, max {settings.max_tokens:,} tokens, "
            f"{settings.length_policy}",
        ),
        (
            "pairs",
            f"{pairs.pairs:,} of {held.sources[0].available:,}{made}, {numbers.tasks:,} tasks, "
            f"{numbers.trajectories:,} groups; {pairs.multi_turn:,} with an ending of several turns",
        ),
        (
            "tokens per sequence",
            f"min {numbers.tokens_min:,}, median {numbers.tokens_median:,g}, p95 {numbers.tokens_p95:,}, "
            f"max {numbers.tokens_max:,}; {pairs.sequences:,} sequences",
        ),
        ("shared beginning", _spread(pairs.shared_prefix_tokens)),
        ("chosen, trained", _spread(pairs.chosen_tokens)),
        ("rejected, trained", _spread(pairs.rejected_tokens)),
        ("longer side", _longer(pairs)),
        (
            "as trees",
            f"{pairs.sequence_tokens:,} tokens one by one, {pairs.tree_tokens:,} with each pair as one tree: "
            f"{factor(pairs.sequence_tokens / pairs.tree_tokens)} fewer",
        ),
        *(("  but", note) for note in inspection.notes),
        ("refused", counted({code: refusal.count for code, refusal in held.refusals.items()})),
        ("cut", counted(numbers.cuts)),
        *closing_lines(held),
    ]
    if inspection.is_scored:
        lines.append(("under the model", _preferred(inspection.lines)))
    return [(label, visible(text)) for label, text in lines]


def side_heading(side: SideView) -> str:
    """Return a side's length, cuts and score in one line."""
    cuts = f" · cut: {', '.join(side.cuts)}" if side.cuts else ""
    score = "" if side.mean_logp is None else f" · mean log-probability {_logp(side.mean_logp)}"
    return f"{side.num_trained_tokens:,} trained tokens{score}{cuts}"


def sequence_heading(side: SideView, number: int) -> str:
    """Return what one of several sequences of a side is; `number` counts from 1."""
    sequence = side.sequences[number - 1]
    turns = ", ".join(f"#{sample_id.rpartition('#')[2]}" for sample_id in sequence.sample_ids)
    return (
        f"sequence {number} of {len(side.sequences)}, turn {turns}: {sequence.num_tokens:,} tokens, "
        f"{sequence.num_trained_tokens:,} trained"
    )


def _print_heading(text: str, console: Console) -> None:
    console.print()
    console.print(Text(visible(f"── {text}"), style="bold"), soft_wrap=True)


def _table(inspection: PairInspection) -> list[str]:
    scored = inspection.is_scored
    names = f"{'':>5} {'pair':<{_ID_CELLS}} {'shared':>8} {'chosen':>7} {'rejected':>8} {'one by one':>11} {'tree':>8}"
    lines = [names + (f" {'logp +':>8} {'logp -':>8}" if scored else "")]
    for number, line in enumerate(inspection.lines[:MOST_LINES]):
        name = line.pair_id if len(line.pair_id) <= _ID_CELLS else f"{line.pair_id[: _ID_CELLS - 1]}…"
        scores = f" {_logp(line.chosen_logp):>8} {_logp(line.rejected_logp):>8}" if scored else ""
        lines.append(
            f"{number:>5} {name:<{_ID_CELLS}} {line.shared_prefix_tokens:>8,} {line.chosen_tokens:>7,} "
            f"{line.rejected_tokens:>8,} {line.sequence_tokens:>11,} {line.tree_tokens:>8,}{scores}"
        )
    hidden = len(inspection.lines) - MOST_LINES
    return [*lines, f"      … and {hidden:,} more; --json has all"] if hidden > 0 else lines


def _spread(lengths: Lengths) -> str:
    return (
        f"min {lengths.min:,}, median {lengths.median:,g}, p95 {lengths.p95:,}, max {lengths.max:,} tokens a pair; "
        f"{lengths.total:,} in all"
    )


def _longer(pairs: PairStatistics) -> str:
    neither = pairs.pairs - pairs.longer_chosen - pairs.longer_rejected
    return f"chosen in {pairs.longer_chosen:,} pairs, rejected in {pairs.longer_rejected:,}, neither in {neither:,}"


def _preferred(lines: tuple[PairLine, ...]) -> str:
    margins = [
        line.chosen_logp - line.rejected_logp
        for line in lines
        if line.chosen_logp is not None and line.rejected_logp is not None
    ]
    right = sum(margin > 0 for margin in margins)
    return (
        f"the chosen side has the higher mean log-probability in {right:,} of {len(margins):,} pairs; "
        f"mean difference {sum(margins) / len(margins):+.4f} nats a token"
    )


def _logp(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
