"""How an inspection looks: on a terminal, in a pipe, and as one self-contained page.

Mask     Trained tokens are coloured on a terminal. Where there is no colour (a pipe, NO_COLOR) they stand between
         U+27E6 and U+27E7, with the weight in front where it is not 1: `⟦×2:…⟧`. `raw_text` is the text alone.
Escapes  Text of logs never acts: control and direction-changing characters are shown as symbols, on the terminal and
         in HTML; the page is rendered with autoescape, holds no script and requests nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from traceforge.errors import StorageError
from traceforge.pages import page_environment
from traceforge.samples.tree_views import (
    cause_line,
    example_parts,
    factor,
    picture,
    tree_heading,
    tree_lines,
    tree_summary,
)

if TYPE_CHECKING:
    from traceforge.samples.inspection import Inspection
    from traceforge.samples.mask_view import Segment
    from traceforge.samples.statistics import DatasetStatistics

EXCERPT_CHARACTERS = 600
_TRAINED_STYLE = "bold green"
_ACTING_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


def raw_text(inspection: Inspection) -> str:
    """Return the sample's text exactly as the model sees it: no mask, no header, nothing replaced."""
    return "".join(segment["text"] for segment in inspection.sample.segments)


def visible(text: str) -> str:
    """Return the text with every character that would act rather than show replaced by a symbol.

    Control characters become control pictures (ESC is U+241B), others `<U+202E>`. Newline and tab stay.
    """
    return _ACTING_CHARACTERS.sub(_symbol, text)


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Print numbers and sample; colour shows the mask on a terminal, brackets where there is no colour."""
    for label, value in summary_lines(inspection):
        console.print(Text(f"{label:<22}", style="dim"), Text(value), sep="", soft_wrap=True)
    print_histogram(inspection.histogram, console)
    trees = tree_lines(inspection.trees)
    if trees:
        console.print()
        console.print(Text(visible("\n".join(trees))), soft_wrap=True)
    coloured = console.is_terminal and not console.no_color
    legend = "green and bold" if coloured else "between ⟦ and ⟧"
    view = inspection.sample
    heading = f"sample {view.index}: {view.sample_id} · {view.num_tokens:,} tokens · trained ({legend}): "
    cuts = f" · cut: {', '.join(view.cuts)}" if view.cuts else ""
    console.print()
    console.print(Text(visible(f"{heading}{view.num_trained_tokens:,}{cuts}"), style="bold"), soft_wrap=True)
    console.print()
    text = masked_text(
        view.segments, coloured=coloured, whole=inspection.whole_text, way_to_all=f"--sample {view.index}"
    )
    console.print(text, soft_wrap=True)


def print_histogram(histogram: Sequence[tuple[int, int, int]], console: Console) -> None:
    """Print lengths as bars, one line a bin."""
    widest = max(count for _, _, count in histogram)
    for low, high, count in histogram:
        bar = "█" * max(1 if count else 0, round(40 * count / widest))
        console.print(Text(f"{low:>9,} … {high:<9,} {count:>6,} {bar}"), soft_wrap=True)


def write_inspection_html(inspection: Inspection, path: Path) -> None:
    """Write the same as one self-contained page: no script, no request, light and dark, made to be printed too.

    Raises:
        StorageError: the file cannot be written; nothing half-written is left.
    """
    filters = {write.__name__: write for write in (cause_line, example_parts, factor, picture, tree_heading)}
    write_page(
        "inspection.html.j2",
        path,
        filters,
        inspection=inspection,
        summary=summary_lines(inspection),
        widest=max(count for _, _, count in inspection.histogram),
        refusals=inspection.statistics.refusals,
    )


def write_page(template: str, path: Path, filters: Mapping[str, Callable[..., object]], **values: object) -> None:
    """Write a page from one of the templates here, escaped, whole or not at all.

    Raises:
        StorageError: the file cannot be written; nothing half-written is left.
    """
    environment = page_environment(Path(__file__).parent / "templates")
    environment.filters["visible"] = visible
    environment.filters.update(filters)
    page = environment.get_template(template).render(**values)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(page, encoding="utf-8", newline="\n", errors="replace")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # Where the folder itself is missing there is no part either.
            part.unlink(missing_ok=True)
        raise StorageError(
            f"{path}: cannot write the page: {error.strerror or error}", hint="free space or choose another --html"
        ) from error


def summary_lines(inspection: Inspection) -> list[tuple[str, str]]:
    """Return what both views say about the whole set, as label and text."""
    settings, held = inspection.settings, inspection.statistics
    numbers = held.train
    refused = {code: refusal.count for code, refusal in held.refusals.items()}
    lines = [
        ("data set", inspection.path),
        ("model", inspection.model),
        (
            "rendering",
            f"{_rendering(inspection)}, loss on {settings.loss_on}, "
            f"max {settings.max_tokens:,} tokens, {settings.length_policy}",
        ),
        ("samples", _origin(held)),
        (
            "tokens per sample",
            f"min {numbers.tokens_min:,}, median {numbers.tokens_median:,g}, p95 {numbers.tokens_p95:,}, "
            f"max {numbers.tokens_max:,}; {numbers.tokens_total:,} in all",
        ),
        ("trained", f"{numbers.trained_tokens:,} tokens, {numbers.trained_share:.1%}"),
        ("repeated prefixes", f"{numbers.repeated_prefix_share:.1%} of all tokens repeat an earlier turn's history"),
        *tree_summary(inspection.trees),
        *(("  but", note) for note in inspection.notes),
        ("refused", counted(refused)),
        ("cut", counted(numbers.cuts)),
    ]
    lines += closing_lines(held)
    return [(label, visible(text)) for label, text in lines]


def closing_lines(held: DatasetStatistics) -> list[tuple[str, str]]:
    """Return the first refusal of each reason and what the template adds on its own, as label and text."""
    lines = [
        (f"  {code}", f"first: {refused.examples[0]}: {refused.detail}") for code, refused in held.refusals.items()
    ]
    if held.default_system_prompt is not None:
        noun = "samples" if held.train.pairs is None else "pairs"
        said = f"{held.default_system_prompt!r} in {held.samples_with_default_system_prompt:,} {noun}"
        lines.append(("added by the template", said))
    return lines


def masked_text(segments: Sequence[Segment], *, coloured: bool, whole: bool, way_to_all: str) -> Text:
    """Return a sample's runs with the mask; without `whole`, long context lacks its middle and says so."""
    text = Text()
    for segment in segments:
        shown = visible(segment["text"])
        if not segment["trained"]:
            text.append(shown if whole else excerpt(shown, way_to_all))
            continue
        weight = "" if segment["weight"] == 1 else f"×{segment['weight']:g}:"
        text.append(f"{weight}{shown}" if coloured else f"⟦{weight}{shown}⟧", style=_TRAINED_STYLE)
    return text


def excerpt(context: str, way_to_all: str) -> str:
    """Return long context without its middle, cut at line ends where there are any near."""
    head, tail = context[:EXCERPT_CHARACTERS], context[-EXCERPT_CHARACTERS:]
    head = head[: head.rfind("\n", EXCERPT_CHARACTERS // 2) + 1] or head
    tail = tail[tail.find("\n", 0, EXCERPT_CHARACTERS // 2) + 1 :]
    hidden = len(context) - len(head) - len(tail)
    if hidden <= EXCERPT_CHARACTERS // 2:
        return context
    lead = "" if head.endswith("\n") else "\n"
    return f"{head}{lead}… {hidden:,} characters of context not shown; `{way_to_all}` shows all …\n{tail}"


def _rendering(inspection: Inspection) -> str:
    if inspection.statistics.sources[0].kind in {"instruction", "prompt_completion"}:
        return "rows as they stand"
    return f"{inspection.settings.rendering}, target {inspection.settings.target}"


def _origin(held: DatasetStatistics) -> str:
    numbers = held.train
    if held.sources[0].kind == "turns":
        return f"{numbers.samples:,} of {numbers.tasks:,} tasks in {numbers.trajectories:,} trajectories"
    return f"{numbers.samples:,} of {held.sources[0].available:,} {held.sources[0].kind.replace('_', '-')} rows"


def counted(counts: Mapping[str, int]) -> str:
    """Return counts by name in one line."""
    return ", ".join(f"{code} {count:,}" for code, count in counts.items()) or "none"


def _symbol(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"
