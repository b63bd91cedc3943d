"""How the tree report looks: lines for a terminal, and numbers for the picture in the page.

Order    Paths are drawn in row order: the deepest branch first, then each fork behind what it forks off from, the
         deepest first. So no connector crosses a bar.
Escapes  Text of logs comes out as it is; who shows it makes it visible (`inspection_views.visible`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traceforge.samples.fork_causes import CAUSE_WORDS, WAYS_OUT, CauseCount, ForkExample
from traceforge.samples.tree_report import DrawnTree, TreeCounts, TreePath, TreeReport

MOST_LINES = 16
MOST_BARS = 48
_LINE_CELLS = 44
_LEAST_PERCENT = 0.25


@dataclass(frozen=True)
class TreeBar:
    """One path of the picture; `left`, `width` and `trained` (left, width) are percent of the tree's depth.

    `row` counts drawn lines from the top; `from_row` is the line of the path it forks off from, None at a root or where
    that one is not drawn.
    """

    row: int
    from_row: int | None
    left: float
    width: float
    trained: tuple[tuple[float, float], ...]
    label: str
    title: str


@dataclass(frozen=True)
class TreePicture:
    """A drawn tree. `gap_row` is the line that stands for what is not drawn, `gap` says what that is."""

    bars: tuple[TreeBar, ...]
    num_rows: int
    depth: int
    gap_row: int | None
    gap: str


def tree_summary(report: TreeReport) -> list[tuple[str, str]]:
    """Return the few lines about the whole set, as label and text."""
    total, continuity = report.total, report.continuity
    if total.samples == report.num_groups:
        return [("prefix trees", "none: each sample is a group of its own")]
    again = (
        f"{total.repeated_tokens:,} of trunks twice, where trees are split" if total.repeated_tokens else "none twice"
    )
    lines = [
        (
            "prefix trees",
            f"{total.sample_tokens:,} tokens one by one, {total.tree_tokens:,} in {_count(total.trees, 'tree')} "
            f"with {_count(total.forks, 'fork')}",
        ),
        (
            "  in rows",
            f"{total.row_tokens:,} tokens in {_count(total.rows, 'row')} of at most {report.tokens_per_row:,}, {again}",
        ),
        ("  saved", savings(report, total)),
    ]
    if continuity.causes:
        causes = ", ".join(f"{CAUSE_WORDS[each.cause]} {each.forks:,}" for each in continuity.causes)
        broken = continuity.pairs - continuity.continued
        lines.append(
            ("  sharing breaks", f"{broken:,} of {continuity.pairs:,} turns do not continue the one before: {causes}")
        )
    else:
        lines.append(("  sharing breaks", f"nowhere: each of {continuity.pairs:,} turns continues the one before"))
    return lines


def savings(report: TreeReport, counts: TreeCounts) -> str:
    """Return the factors of saved tokens, pairs and, where the shape of the model is known, work."""
    work = "" if report.shape is None else f", {factor(counts.flop_factor(report.shape))} fewer operations"
    return f"{factor(counts.token_factor)} fewer tokens, {factor(counts.pair_factor)} fewer attention pairs{work}"


def factor(value: float) -> str:
    """`10.96` -> `11.0×`."""
    return f"{value:.3g}×" if value >= 100 else f"{value:.1f}×"


def tree_lines(report: TreeReport) -> list[str]:
    """Return what a terminal shows below the summary: the largest savings, the causes, one tree."""
    if report.total.samples == report.num_groups:
        return []
    return [*_group_lines(report), "", *_cause_lines(report.continuity.causes), *_drawn_lines(report.drawn)]


def cause_line(found: CauseCount) -> str:
    """Return a cause with its count, what it costs, and the way out if there is one."""
    way_out = WAYS_OUT.get(found.cause)
    return (
        f"{found.forks:,} × {CAUSE_WORDS[found.cause]}: the next turn cannot use {found.tokens:,} tokens"
        f"{f'; {way_out}' if way_out else ''}"
    )


def example_parts(example: ForkExample) -> tuple[str, str, str, str]:
    """Return where a fork is, what stands before it, and how the two samples go on; line ends are shown as `⏎`."""
    turn = example.next_sample_id.rpartition("#")[2]
    before, text, next_text = (each.replace("\n", "⏎") for each in (example.before, example.text, example.next_text))
    return f"{example.sample_id} and #{turn} after {example.depth:,} tokens", before, text, next_text


def tree_heading(tree: DrawnTree) -> str:
    """Return the one-line description of a drawn tree."""
    counts = tree.counts
    return (
        f"{tree.group_id}: {_count(counts.samples, 'turn')}, {counts.sample_tokens:,} tokens one by one, "
        f"{counts.tree_tokens:,} in the tree, {_count(counts.forks, 'fork')}"
    )


def picture(tree: DrawnTree) -> TreePicture:
    """Return the bars of a tree, the middle left out where there are more than `MOST_BARS`."""
    head, tail = _ends(tree.paths, MOST_BARS)
    hidden = tree.paths[head : len(tree.paths) - tail]
    row_of = {number: number for number in range(head)}
    row_of |= {len(tree.paths) - tail + number: head + bool(hidden) + number for number in range(tail)}
    bars = tuple(_bar(tree, number, row, row_of) for number, row in row_of.items())
    return TreePicture(
        bars=bars,
        num_rows=len(row_of) + bool(hidden),
        depth=tree.depth,
        gap_row=head if hidden else None,
        gap=_hidden_words(hidden),
    )


def _bar(tree: DrawnTree, number: int, row: int, row_of: dict[int, int]) -> TreeBar:
    path, whole = tree.paths[number], 100 / tree.depth
    where = "starts a tree" if path.parent < 0 else f"forks off after {path.depth:,} tokens"
    return TreeBar(
        row=row,
        from_row=row_of.get(path.parent),
        left=round(path.depth * whole, 3),
        width=round(max(path.tokens * whole, _LEAST_PERCENT), 3),
        trained=tuple(
            (round(start * whole, 3), round(max((stop - start) * whole, _LEAST_PERCENT), 3))
            for start, stop in path.trained
        ),
        label=turn_words(path.turns),
        title=f"{turn_words(path.turns)}: {where}, {path.tokens:,} tokens of its own",
    )


def turn_words(turns: Sequence[str]) -> str:
    """Return turns as a reader writes them: `turn 4`, `turns 0–3, 7`; ids that are no numbers stand as they are."""
    if not all(turn.isdecimal() for turn in turns):
        return ", ".join(turns)
    runs: list[list[int]] = []
    for number in sorted({int(turn) for turn in turns}):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
    return f"turn {words}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"turns {words}"


def _group_lines(report: TreeReport) -> list[str]:
    lines = ["largest savings          turns   one by one      in rows   saved  forks  rows"]
    for group in report.groups:
        counts = group.counts
        lines.append(
            f"  {_clipped(group.group_id, 22):<22} {counts.samples:>5,} {counts.sample_tokens:>12,} "
            f"{counts.row_tokens:>12,} {factor(counts.token_factor):>7} {counts.forks:>6,} {counts.rows:>5,}"
        )
    if report.num_groups > len(report.groups):
        lines.append(f"  and {report.num_groups - len(report.groups):,} more")
    return lines


def _cause_lines(causes: Sequence[CauseCount]) -> list[str]:
    lines = []
    for found in causes:
        where, before, text, next_text = example_parts(found.example)
        lines += [
            cause_line(found),
            f"  {where}, behind …{before[-40:]}",
            f"    here  {text[:80]}",
            f"    next  {next_text[:80]}",
        ]
    return [*lines, ""] if lines else []


def _drawn_lines(tree: DrawnTree) -> list[str]:
    """Return the tree as a heading and at most `MOST_LINES` bars, with a line for those left out."""
    head, tail = _ends(tree.paths, MOST_LINES)
    hidden = tree.paths[head : len(tree.paths) - tail]
    lines = [tree_heading(tree), "  fork at      own"]
    lines += [_drawn_line(tree, path) for path in tree.paths[:head]]
    if hidden:
        lines.append(f"        …        … {_hidden_words(hidden)}")
    lines += [_drawn_line(tree, path) for path in tree.paths[len(tree.paths) - tail :]]
    return lines


def _drawn_line(tree: DrawnTree, path: TreePath) -> str:
    first = path.depth * _LINE_CELLS // tree.depth
    cells = max(1, round(path.tokens * _LINE_CELLS / tree.depth))
    bar = (" " * max(0, first - 1) + ("└" if path.parent >= 0 and first else "") + "█" * cells)[: _LINE_CELLS + 1]
    depth = f"{path.depth:,}" if path.parent >= 0 else "root"
    return f"{depth:>9} {path.tokens:>8,} {bar:<{_LINE_CELLS + 1}} {_clipped(turn_words(path.turns), 24)}"


def _ends(paths: Sequence[TreePath], most: int) -> tuple[int, int]:
    """Return how many paths are shown from the front and from the back."""
    if len(paths) <= most:
        return len(paths), 0
    return most - most // 3, most // 3


def _hidden_words(paths: Sequence[TreePath]) -> str:
    tokens = sum(path.tokens for path in paths)
    return f"{_count(len(paths), 'path')} not drawn, {tokens:,} tokens" if paths else ""


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"
