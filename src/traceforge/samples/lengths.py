"""Length policies: what becomes of observations and samples that are too long.

shorten_observations  Each long observation keeps its head and its tail, the same way in every sample of the trajectory,
                      so the samples still share their history. The default.
refuse                Nothing is cut; a sample that is too long is refused.
drop_oldest           The oldest observations give way to a marker, as few as it takes, sample by sample.
truncate_end          The token sequence is cut at its end.

Only what the environment answered is ever shortened, never the task or a turn. Whatever is cut has a code in the
sample's `cuts`; a sample that still does not fit is refused as `too_long`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from traceforge.samples.encoding import Encoding, TextEncoder
from traceforge.trajectories.record import Message

OBSERVATIONS_SHORTENED = "observations_shortened"
OBSERVATIONS_DROPPED = "observations_dropped"
CUT_AT_END = "cut_at_end"

DROPPED_MARKER = "[... observation omitted ...]"
_WINDOW_CHARS_PER_TOKEN = 8
_MARGIN_TOKENS = 16
_WHOLE_CHARS = 1_000_000


def shorten_observations(
    messages: Sequence[Message], limit_tokens: int, encoder: TextEncoder
) -> tuple[tuple[Message, ...], frozenset[int]]:
    """Return the messages with long observations shortened, and the indices of those that were."""
    kept: list[Message] = []
    shortened: set[int] = set()
    for index, message in enumerate(messages):
        text = shorten(message.content, limit_tokens, encoder) if message.observation else None
        if text is None:
            kept.append(message)
        else:
            kept.append(msgspec.structs.replace(message, content=text))
            shortened.add(index)
    return tuple(kept), frozenset(shortened)


def shorten(text: str, limit_tokens: int, encoder: TextEncoder) -> str | None:
    """Return head and tail of `text`, half of `limit_tokens` each, around a line that counts what is missing.

    None if the text has no more tokens than that, or if the line would be longer than what it stands for. Cuts fall
    between tokens and never inside a character. Only a window at each end is tokenised: an observation of 60 MB costs
    no more than one of 60 KB.
    """
    window = limit_tokens * _WINDOW_CHARS_PER_TOKEN
    while window < len(text) // 2:
        head, tail = encoder.encode_whole([text[:window], text[-window:]])
        # More than the limit with a margin: the last tokens of a window change with the text behind it.
        if min(head.ids.size, tail.ids.size) > limit_tokens + _MARGIN_TOKENS:
            return _joined(text, *_cuts(head, tail, limit_tokens, len(text) - window))
        window *= 2
    (whole,) = encoder.encode_whole([text])
    return None if whole.ids.size <= limit_tokens else _joined(text, *_cuts(whole, whole, limit_tokens, 0))


def _cuts(head: Encoding, tail: Encoding, limit_tokens: int, tail_offset: int) -> tuple[int, int]:
    head_tokens = limit_tokens - limit_tokens // 2
    return int(head.stops[head_tokens - 1]), int(tail.starts[-(limit_tokens // 2)]) + tail_offset


def _joined(text: str, head_stop: int, tail_start: int) -> str | None:
    marker = f"\n[... {tail_start - head_stop} characters omitted ...]\n"
    return None if tail_start - head_stop <= len(marker) else text[:head_stop] + marker + text[tail_start:]


def telling_prefix(text: str, limit_tokens: int, encoder: TextEncoder) -> int:
    """Return how many characters of `text` are enough to know its first `limit_tokens` tokens and whether it has more.

    All of it, unless it is huge: then a beginning with more than twice as many tokens, which no text behind it undoes.
    """
    window = max(_WHOLE_CHARS, limit_tokens * 64)
    while window < len(text):
        if encoder.encode(text[:window]).ids.size > 2 * limit_tokens:
            return window
        window *= 2
    return len(text)


def droppable_observations(messages: Sequence[Message], stop: int) -> list[int]:
    """Return the indices below `stop` of observations that dropping makes shorter, oldest first."""
    return [
        index
        for index, message in enumerate(messages[:stop])
        if message.observation and len(message.content) > len(DROPPED_MARKER)
    ]


def drop_observations(messages: Sequence[Message], indices: Sequence[int]) -> tuple[Message, ...]:
    """Return the messages with the observations at `indices` replaced by a marker."""
    dropped = set(indices)
    return tuple(
        msgspec.structs.replace(message, content=DROPPED_MARKER) if index in dropped else message
        for index, message in enumerate(messages)
    )


def fewest(limit: int, fits: Callable[[int], bool]) -> int | None:
    """Return the smallest count in `1..limit` that fits, or None; more dropped never fits worse."""
    if limit < 1 or not fits(limit):
        return None
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low
