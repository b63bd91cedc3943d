"""The two sides of a preference pair as messages: where their common prompt ends, and what makes them no pair.

Prompt   Given, or the longest common run of whole messages. A reply that both sides begin with in their text is no part
         of it: the prompt ends where the first message differs, and its tokens are trained on both sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from traceforge.trajectories.record import Message, Trajectory

WAYS_OUT = {
    "no_common_beginning": "both sides must begin with the same messages, the user's among them: runs of one task",
    "no_prompt": "give `prompt`, or give chosen and rejected as lists of messages that begin with it",
    "prompt_contradicts_sides": "give the replies alone behind `prompt`, or whole conversations that begin with it",
    "identical_sides": "nothing to learn from two equal replies",
    "empty_side": "both sides need a reply behind the prompt",
    "no_assistant_turn": "both sides need a turn of the assistant behind the prompt",
    "no_trained_turn": "the log's own flags say that no turn of this side is to be trained",
    "tools_differ": "the schemas of the tools are part of the prompt: pair runs that had the same ones",
    "histories_differ": "turns are paired behind one history; to pair whole runs, name them without `#turn`",
    "unknown_trajectory": "name trajectories by the ids in the ingest folder's trajectories.jsonl",
    "unknown_turn": "turns are counted from 0; `{trajectory_id}#{turn}`",
    "bad_pair": "a pair needs `chosen` and `rejected`",
    "json_text": "give lists of messages as lists, not as JSON text",
    "duplicate": "nothing to do: the first copy is kept",
}
"""Reasons of their own, with the way out; those of messages and files are in `trajectories/refusals.py`."""


class PairRefused(Exception):
    """A verdict on one pair; the build counts it and goes on.

    Args:
        code: what to count by.
        detail: a sentence for a person, without the file.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


@dataclass(frozen=True, slots=True)
class PairSide:
    """One side of a pair.

    Args:
        trajectory: the record that holds it.
        stop: how many of its messages are the side.
        turn: the number of the turn that is paired; None where the whole record is the side.
        is_new: the record was made for this pair; else it is one of an ingest folder.
    """

    trajectory: Trajectory
    stop: int
    turn: int | None = None
    is_new: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of the side."""
        return self.trajectory.messages[: self.stop]

    @property
    def side_id(self) -> str:
        """What the pair's id calls it."""
        turn = "" if self.turn is None else f"#{self.turn}"
        return f"{self.trajectory.trajectory_id}{turn}"


def same_messages(one: Message, other: Message) -> bool:
    """Whether two messages are the same but for the log's own flag of whether they are trained."""
    return msgspec.structs.replace(one, trained=None) == msgspec.structs.replace(other, trained=None)


def common_messages(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return how many leading messages two conversations share."""
    pairs = zip(chosen, rejected, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda both: same_messages(*both), pairs))


def common_prompt(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return how many leading messages are the prompt of two whole conversations.

    Raises:
        PairRefused: `no_common_beginning`: they share none, or none of a user, so they are not about one task;
            `identical_sides`: they are the same throughout.
    """
    shared = common_messages(chosen, rejected)
    if 0 < shared == len(chosen) == len(rejected):
        raise PairRefused("identical_sides", f"both sides are the same {shared} message(s)")
    if not any(message.role == "user" for message in chosen[:shared]):
        what = "nothing" if shared == 0 else f"only {shared} message(s) of role {chosen[0].role}"
        raise PairRefused("no_common_beginning", f"the sides share {what}, and no message of a user")
    return shared


def ending_turns(messages: Sequence[Message], prompt_messages: int) -> list[int]:
    """Return the indices of the turns that are trained in the ending of a side.

    Those of the assistant behind the prompt, without the ones that the log flags as untrained and without empty ones.
    """
    return [
        index
        for index in range(prompt_messages, len(messages))
        if messages[index].role == "assistant"
        and messages[index].trained is not False
        and not is_empty(messages[index])
    ]


def is_empty(message: Message) -> bool:
    """Whether a message says nothing: no text but white space, no reasoning, no call."""
    return not (message.content.strip() or (message.reasoning or "").strip() or message.tool_calls)


def check_endings(chosen: Sequence[Message], rejected: Sequence[Message], prompt_messages: int) -> None:
    """Refuse sides that are no preference pair.

    Raises:
        PairRefused: `empty_side`, `no_assistant_turn`, `no_trained_turn` or `identical_sides`.
    """
    for name, side, other in (("chosen", chosen, "rejected"), ("rejected", rejected, "chosen")):
        _check_ending(name, side[prompt_messages:], other)
    endings = (chosen[prompt_messages:], rejected[prompt_messages:])
    if len(chosen) == len(rejected) and all(itertools.starmap(same_messages, zip(*endings, strict=True))):
        raise PairRefused("identical_sides", f"both sides have the same {len(endings[0])} message(s) behind the prompt")


def _check_ending(name: str, ending: Sequence[Message], other: str) -> None:
    turns = [message for message in ending if message.role == "assistant"]
    if not ending:
        raise PairRefused("empty_side", f"{name} has no message behind the prompt; is it a beginning of {other}?")
    if not turns:
        raise PairRefused("no_assistant_turn", f"{name} has {len(ending)} message(s) behind the prompt, no assistant's")
    if all(is_empty(message) for message in turns):
        raise PairRefused("empty_side", f"{name} has only empty turns behind the prompt")
    if not ending_turns(ending, 0):
        raise PairRefused("no_trained_turn", f"every turn of {name} behind the prompt is flagged untrained")
