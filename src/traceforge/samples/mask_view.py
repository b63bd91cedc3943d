"""The mask view: a sample's text cut where its training weight changes. Terminal, HTML and report show the same runs.

Exact    The texts joined are the whole sample decoded at once, so nothing is shown that the model does not see.
Borders  Tokens are bytes, not characters. Where a border between two runs falls inside a character, the character
         stands whole at the start of the later run; decoding each run alone would show U+FFFD twice instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

from traceforge.samples.tokens import Sample


class Segment(TypedDict):
    """A run of tokens of one weight, as text. `trained` is `weight != 0`."""

    text: str
    trained: bool
    weight: float


def sample_text(sample: Sample, tokenizer: Any) -> str:
    """Return the text the model sees, special tokens included, exactly as its tokens spell it."""
    return _decode(tokenizer, sample.token_ids_S.tolist())


def mask_segments(sample: Sample, tokenizer: Any) -> list[Segment]:
    """Return the sample's text as runs of equal weight, in order; joined they are `sample_text`.

    A trained run whose characters all stand in a neighbour (it ends inside one character) keeps an empty text rather
    than vanishing.
    """
    token_ids = sample.token_ids_S.tolist()
    whole = _decode(tokenizer, token_ids)
    borders = (np.flatnonzero(np.diff(sample.weights_S)) + 1).tolist()
    inner = [_text_offset(whole, token_ids[:border], tokenizer) for border in borders]
    offsets = [*itertools.accumulate([0, *inner], max), len(whole)]
    starts = [0, *borders]
    segments: list[Segment] = []
    for number, start in enumerate(starts):
        weight = float(sample.weights_S[start])
        text = whole[offsets[number] : offsets[number + 1]]
        if text or weight:
            segments.append({"text": text, "trained": weight != 0, "weight": weight})
    return segments


def _text_offset(whole: str, head_ids: Sequence[int], tokenizer: Any) -> int:
    """Return how many characters of `whole` the head spells in full: its longest common prefix with the head's text."""
    head = _decode(tokenizer, head_ids)
    if whole.startswith(head):
        return len(head)
    low, high = 0, len(head)
    while low < high:
        middle = (low + high + 1) // 2
        if whole.startswith(head[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
