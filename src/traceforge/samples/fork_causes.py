"""Why sharing breaks: where a turn does not continue the sample of the turn before it, and what made the difference.

    before            then, in this turn's sample      and in the next turn's
    …assistant\\n      <think>\\nI should look at…       I will list the files…      reasoning_dropped

Facts    A cause is read off the two texts at the first token in which they differ, the messages and the codes of what
         was cut; `other` says that none of these explains it, and shows the text.
Not one  `truncate_end` never makes a fork, it only ends a sample earlier; `shorten_observations` cuts every sample of
         a trajectory alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from traceforge.samples.lengths import DROPPED_MARKER, OBSERVATIONS_DROPPED
from traceforge.samples.prefix_tree import common_prefix_length
from traceforge.samples.text_overlap import common_prefix_length as common_characters
from traceforge.samples.tokens import IntArray, Sample
from traceforge.samples.transcript import CLOSING_LINE
from traceforge.trajectories.record import Message, Trajectory

Cause = Literal[
    "reasoning_dropped", "last_turn_differs", "cuts_differ", "tokens_merge", "transcript_closes_prompt", "other"
]
Decode = Callable[[IntArray], str]

CAUSE_WORDS: dict[Cause, str] = {
    "reasoning_dropped": "template drops reasoning of earlier turns",
    "last_turn_differs": "template renders the last turn differently",
    "cuts_differ": "cut differs between samples",
    "tokens_merge": "tokens merge across the border",
    "transcript_closes_prompt": "transcript rendering closes each prompt with a line of its own",
    "other": "other",
}
WAYS_OUT: dict[Cause, str] = {
    "cuts_differ": 'data.length_policy = "shorten_observations" cuts every sample of a trajectory alike',
    "transcript_closes_prompt": 'data.rendering = "chat" renders each turn behind its history',
}

_TOKENS_BEFORE = 64
_TOKENS_AFTER = 256
_COMPARED_CHARACTERS = 120
_TAG_CHARACTERS = 48
_HEADER_CHARACTERS = 200
_TAIL_CHARACTERS = 12
_SHOWN_BEFORE, _SHOWN_AFTER = 60, 100


class ForkExample(msgspec.Struct, frozen=True, kw_only=True):
    """One fork with the text around it. `depth` tokens are shared; `text` and `next_text` are how the two go on."""

    sample_id: str
    next_sample_id: str
    depth: int
    before: str
    text: str
    next_text: str


class CauseCount(msgspec.Struct, frozen=True, kw_only=True):
    """Forks of one cause. `tokens` are those of the earlier samples behind the fork, which the next cannot use."""

    cause: Cause
    forks: int
    tokens: int
    example: ForkExample


class Continuity(msgspec.Struct, frozen=True):
    """How consecutive turns of a trajectory follow each other.

    Args:
        pairs: of a turn's sample and that of the next turn which is trained.
        continued: of them, where the next begins with all of the first.
        causes: of the others, most frequent first.
    """

    pairs: int
    continued: int
    causes: tuple[CauseCount, ...]


def explain_forks(
    groups: Mapping[str, Sequence[Sample]], trajectories: Iterable[Trajectory], decode: Decode, *, transcript: bool
) -> Continuity:
    """Return how the turns of each trajectory continue each other, and why not where they do not.

    Args:
        groups: the samples of each trajectory by its id, in the order of their turns.
        trajectories: the records; one without samples is passed over.
        decode: tokens to text, special tokens included.
        transcript: the samples are in the transcript rendering.
    """
    pairs = 0
    found: dict[Cause, list[tuple[_Fork, int]]] = {}
    for trajectory in trajectories:
        turns = trajectory.turns()
        for sample, following in pairwise(groups.get(trajectory.trajectory_id, ())):
            pairs += 1
            depth = common_prefix_length(sample.token_ids_S, following.token_ids_S)
            if depth == sample.num_tokens:
                continue
            fork = _fork(sample, following, depth, decode)
            turn = turns[int(sample.sample_id.rpartition("#")[2])]
            cause = _cause(fork, trajectory.messages[: turn + 1], decode, transcript)
            found.setdefault(cause, []).append((fork, sample.num_tokens - depth))
    causes = [
        CauseCount(
            cause=cause,
            forks=len(forks),
            tokens=sum(tokens for _, tokens in forks),
            example=_example(forks[0][0]),
        )
        for cause, forks in found.items()
    ]
    broken = sum(each.forks for each in causes)
    return Continuity(pairs, pairs - broken, tuple(sorted(causes, key=lambda each: -each.forks)))


@dataclass(frozen=True, slots=True)
class _Fork:
    """Two samples that part after `depth` tokens, with the text around.

    `text` and `next_text` begin some tokens before the fork and are alike for `place` characters; `stop` is where both
    tokens in which they first differ have ended.
    """

    sample: Sample
    following: Sample
    depth: int
    text: str
    next_text: str
    place: int
    stop: int
    whole: bool
    """`text` reaches the end of the sample."""


def _fork(sample: Sample, following: Sample, depth: int, decode: Decode) -> _Fork:
    start, stop = max(0, depth - _TOKENS_BEFORE), depth + _TOKENS_AFTER
    text, next_text = (decode(each.token_ids_S[start:stop]) for each in (sample, following))
    ends = [len(decode(each.token_ids_S[start : depth + 1])) for each in (sample, following)]
    place = common_characters(text, next_text)
    return _Fork(sample, following, depth, text, next_text, place, max(ends), stop >= sample.num_tokens)


def _cause(fork: _Fork, messages: Sequence[Message], decode: Decode, transcript: bool) -> Cause:
    """Return the first cause that the facts show; `messages` end with the turn of the earlier sample."""
    if fork.place >= fork.stop or (fork.whole and fork.place >= len(fork.text)):
        return "tokens_merge"  # the same text, in other tokens
    dropped = OBSERVATIONS_DROPPED in {*fork.sample.cuts, *fork.following.cuts}
    if dropped and any(_parts_at(fork.place, text, DROPPED_MARKER) for text in (fork.text, fork.next_text)):
        return "cuts_differ"
    if any(_is_dropped(fork, _reasoning(message)) for message in messages if message.role == "assistant"):
        return "reasoning_dropped"
    if transcript and _parts_at(fork.place, fork.text, f"\n{CLOSING_LINE}"):
        return "transcript_closes_prompt"
    return "last_turn_differs" if _is_in_last_turn(fork, messages, decode) else "other"


def _parts_at(place: int, text: str, words: str, *, slack: int = 0) -> bool:
    """Return whether `place` lies within an occurrence of `words`, or at most `slack` characters before it."""
    first = text.find(words, max(0, place - len(words)))
    return 0 <= first <= place + slack


def _reasoning(message: Message) -> str:
    """Return the reasoning of a turn, also where the log keeps it inside the text."""
    if message.reasoning:
        return message.reasoning.strip()
    inside, closing, _ = message.content.partition("</think>")
    return inside.rpartition("<think>")[2].strip() if closing else ""


def _is_dropped(fork: _Fork, reasoning: str) -> bool:
    """Return whether the fork stands where the earlier sample has this reasoning and the next one has not."""
    words = reasoning[:_COMPARED_CHARACTERS]
    return (
        bool(words)
        and _parts_at(fork.place, fork.text, words, slack=_TAG_CHARACTERS)
        and words not in fork.next_text[max(0, fork.place - len(words)) :]
    )


def _is_in_last_turn(fork: _Fork, messages: Sequence[Message], decode: Decode) -> bool:
    """Return whether all that the earlier sample has behind the fork is its own turn, header included.

    True where the fork is a trained token of the turn. Before it stand the header and what is not trained of the turn;
    anything that stands further ahead is followed by the end of the message before the turn.
    """
    start = _trained_start(fork.sample)
    if fork.depth >= start:
        return True
    turn, before = messages[-1], [message.content.strip() for message in messages[:-1] if message.content.strip()]
    between = decode(fork.sample.token_ids_S[fork.depth : start])
    own_characters = len(turn.content) + len(turn.reasoning or "")
    tails = [text[-_TAIL_CHARACTERS:] for text in (*before[-1:], DROPPED_MARKER)]
    return len(between) <= own_characters + _HEADER_CHARACTERS and not any(tail in between for tail in tails)


def _trained_start(sample: Sample) -> int:
    """Return where the last run of trained tokens begins: at the turn, or at its action.

    Under `loss_on = "all"` the generation prompt, which is never trained, ends the run before it; a template without
    one leaves a single run from the first token on, which says nothing: then, the end of the sample.
    """
    trained = np.flatnonzero(sample.weights_S)
    borders = np.flatnonzero(np.diff(trained) > 1)
    start = int(trained[borders[-1] + 1 if borders.size else 0])
    return start if start > 1 else sample.num_tokens


def _example(fork: _Fork) -> ForkExample:
    return ForkExample(
        sample_id=fork.sample.sample_id,
        next_sample_id=fork.following.sample_id,
        depth=fork.depth,
        before=fork.text[max(0, fork.place - _SHOWN_BEFORE) : fork.place],
        text=fork.text[fork.place : fork.place + _SHOWN_AFTER],
        next_text=fork.next_text[fork.place : fork.place + _SHOWN_AFTER],
    )
