"""What the inspection of samples and that of pairs share: bins of lengths, and finding what is to be shown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from traceforge.errors import InputError

HISTOGRAM_BINS = 10


def length_histogram(lengths: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Return up to ten bins of equal width over the lengths as `(from, to, count)`, both ends included."""
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // HISTOGRAM_BINS))
    counts = np.bincount((np.asarray(lengths) - low) // width)
    return tuple(
        (low + number * width, min(high, low + (number + 1) * width - 1), int(count))
        for number, count in enumerate(counts)
    )


def find_shown(ids: Sequence[str], wanted: int | str, *, path: str, noun: str) -> int:
    """Return the place of what is to be shown among a non-empty set's ids.

    Args:
        wanted: a place from 0, also as text, or an id.
        path: the data set, for the message.
        noun: what one of them is called.

    Raises:
        InputError: there is no such one; the message says what there is.
    """
    if isinstance(wanted, str) and wanted in ids:
        return ids.index(wanted)
    if isinstance(wanted, str) and wanted.isdecimal():
        wanted = int(wanted)
    if isinstance(wanted, int) and 0 <= wanted < len(ids):
        return wanted
    raise InputError(
        f"{path}: no {noun} {wanted!r}; there are {len(ids)}, from 0 ({ids[0]}) to {len(ids) - 1} ({ids[-1]})",
        hint=f"--sample takes an index or a {noun} id; a refused {noun} has no tokens to show",
    )
