"""The mask view of samples: which text is trained, cut down to what a page can hold.

Order    A long untrained beginning (the prompt) folds away but for its end; from there on everything is shown.
Cuts     Text beyond a budget is left out of its middle, and the number of characters left out stands in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from traceforge.evidence.formats import visible

MOST_SAMPLES = 6
_FOLDED_CHARACTERS = 30_000
_SHOWN_CHARACTERS = 24_000
_TAIL_CHARACTERS = 240
_SHORT_ENOUGH = 900
_MOST_PIECES = 400


@dataclass(frozen=True)
class Piece:
    """A run of text of one weight. `left_out` > 0: a gap of so many characters, which has no text."""

    text: str
    trained: bool
    weight: float
    left_out: int = 0


@dataclass(frozen=True)
class MaskView:
    """One sample: `folded` is the beginning that is closed at first, `shown` is the rest."""

    sample_id: str
    set: str
    num_tokens: int | None
    trained_tokens: int | None
    folded: tuple[Piece, ...]
    folded_characters: int
    shown: tuple[Piece, ...]

    @property
    def trained_share(self) -> float | None:
        """Trained tokens by tokens."""
        if not self.num_tokens or self.trained_tokens is None:
            return None
        return self.trained_tokens / self.num_tokens


def mask_views(samples: Sequence[Mapping[str, Any]]) -> list[MaskView]:
    """Return the views of the first samples; a field that is missing is None."""
    return [_view(sample) for sample in samples[:MOST_SAMPLES]]


def _view(sample: Mapping[str, Any]) -> MaskView:
    pieces = [
        Piece(str(each.get("text", "")), bool(each.get("trained")), float(each.get("weight") or 0.0))
        for each in sample.get("segments") or ()
    ]
    folded: list[Piece] = []
    if len(pieces) > 1 and not pieces[0].trained and len(pieces[0].text) > _SHORT_ENOUGH:
        prompt = pieces[0].text
        cut = _line_start(prompt, len(prompt) - _TAIL_CHARACTERS)
        folded = [Piece(prompt[:cut], False, 0.0)]
        pieces[0] = Piece(prompt[cut:], False, 0.0)
    return MaskView(
        sample_id=visible(str(sample.get("sample_id", "?"))),
        set=str(sample.get("set", "?")),
        num_tokens=sample.get("num_tokens"),
        trained_tokens=sample.get("trained_tokens"),
        folded=tuple(_within(folded, _FOLDED_CHARACTERS)),
        folded_characters=sum(len(piece.text) for piece in folded),
        shown=tuple(_within(pieces, _SHOWN_CHARACTERS)),
    )


def _line_start(text: str, position: int) -> int:
    newline = text.find("\n", position)
    return newline + 1 if 0 <= newline < len(text) - 1 else position


def _within(pieces: Sequence[Piece], budget: int) -> list[Piece]:
    """Return the pieces with, if they are too long together, the longest ones cut in their middle."""
    if len(pieces) > _MOST_PIECES:
        half = _MOST_PIECES // 2
        middle = sum(len(piece.text) for piece in pieces[half:-half])
        pieces = [*pieces[:half], Piece("", False, 0.0, left_out=middle), *pieces[-half:]]
    limit = _limit_for([len(piece.text) for piece in pieces], budget)
    cut: list[Piece] = []
    for piece in pieces:
        left_out = len(piece.text) - limit
        if left_out <= 0:
            cut.append(replace(piece, text=visible(piece.text)))
            continue
        half = limit // 2
        cut.append(Piece(visible(piece.text[: limit - half]), piece.trained, piece.weight))
        cut.append(Piece("", piece.trained, piece.weight, left_out=left_out))
        cut.append(Piece(visible(piece.text[len(piece.text) - half :]), piece.trained, piece.weight))
    return cut


def _limit_for(lengths: Sequence[int], budget: int) -> int:
    """Return the largest length that every piece may keep so that all together stay within `budget`."""
    room, left = budget, len(lengths)
    for length in sorted(lengths):
        if length * left > room:
            return room // left
        room, left = room - length, left - 1
    return max(lengths, default=0)
