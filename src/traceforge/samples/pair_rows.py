"""Preference rows to two conversations with one prompt: TRL-style rows and OpenAI preference rows.

TRL      `prompt`, `chosen`, `rejected`, each text, one message or a list of messages, and `tools`. A side that is
         messages may repeat those of the prompt. Without a prompt, it is the longest common run of whole messages.
         Text is one message: the user's as a prompt, the assistant's as a side, and then the reply alone.
OpenAI   `input: {messages, tools}`, `preferred_output`, `non_preferred_output`.
Same     Messages and tools are read as `traceforge ingest` reads them, so a history means the same to every objective.
Beside   `pair_id` or `id` names the pair; `task_id`, `instance_id` or `prompt_id` its task; `group` or `trajectory_id`
         what an update never splits. Other keys are counted as `unread_key:NAME`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from traceforge.samples.pair_sides import PairRefused, check_endings, common_prompt, same_messages
from traceforge.trajectories.readers.chat import first_name, is_message_list
from traceforge.trajectories.readers.content import read_tools
from traceforge.trajectories.readers.messages import pair_results, read_message
from traceforge.trajectories.record import Message
from traceforge.trajectories.refusals import Refused
from traceforge.trajectories.text import kind_of, parse_json

RowFormat = Literal["trl-preference", "openai-preference"]

_TRL_KEYS = frozenset(("prompt", "chosen", "rejected", "tools"))
_OPENAI_KEYS = frozenset(("input", "preferred_output", "non_preferred_output"))
_INPUT_KEYS = frozenset(("messages", "tools", "parallel_tool_calls"))
_ID_KEYS = ("pair_id", "id")
_TASK_KEYS = ("task_id", "instance_id", "prompt_id")
_GROUP_KEYS = ("group", "trajectory_id")


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """One row, read and checked.

    Args:
        row_format: which form it had.
        chosen: the whole conversation, prompt first.
        rejected: the same of the other side.
        prompt_messages: how many messages they share as the prompt.
        tools: schemas that both sides were given.
        name: as the row calls itself, or None.
        task: as the row says, or None.
        group: as the row says, or None.
    """

    row_format: RowFormat
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    prompt_messages: int
    tools: tuple[dict[str, Any], ...]
    name: str | None
    task: str | None
    group: str | None


def row_format(value: object) -> RowFormat | None:
    """Return which form of preference row a JSON value has, or None."""
    if not isinstance(value, dict):
        return None
    if "preferred_output" in value and "non_preferred_output" in value:
        return "openai-preference"
    return "trl-preference" if "chosen" in value and "rejected" in value else None


def read_pair_row(row: dict[str, Any], notes: Counter[str]) -> PreferenceRow:
    """Return the pair of one row; what is left unread or repaired is counted in `notes`.

    Raises:
        PairRefused: with the reason.
    """
    found = row_format(row)
    if found is None:
        raise PairRefused("bad_pair", f"neither chosen and rejected nor preferred_output: {', '.join(map(str, row))}")
    try:
        if found == "trl-preference":
            prompt, tools, sides, read = row.get("prompt"), row.get("tools"), ("chosen", "rejected"), _TRL_KEYS
        else:
            prompt, tools = _openai_input(row.get("input"), notes)
            sides, read = ("preferred_output", "non_preferred_output"), _OPENAI_KEYS
        chosen, rejected, prompt_messages = _conversations(prompt, row[sides[0]], row[sides[1]])
        if isinstance(prompt, str) and prompt and all(_begins_with_text(row[side], prompt) for side in sides):
            notes["replies_begin_with_prompt_text"] += 1
        schemas = read_tools(tools, notes)
    except Refused as refused:
        raise PairRefused(refused.reason, refused.detail) from refused
    except RecursionError as error:
        raise PairRefused("too_deeply_nested", "arrays and objects are nested too deeply") from error
    check_endings(chosen, rejected, prompt_messages)
    for key in row.keys() - read - {*_ID_KEYS, *_TASK_KEYS, *_GROUP_KEYS}:
        notes[f"unread_key:{key[:80]}"] += 1
    return PreferenceRow(
        row_format=found,
        chosen=chosen,
        rejected=rejected,
        prompt_messages=prompt_messages,
        tools=schemas,
        name=first_name(row, _ID_KEYS),
        task=first_name(row, _TASK_KEYS),
        group=first_name(row, _GROUP_KEYS),
    )


def _openai_input(held: object, notes: Counter[str]) -> tuple[object, object]:
    if not isinstance(held, dict) or not isinstance(held.get("messages"), list):
        raise PairRefused("no_prompt", f"input is {kind_of(held)}, not an object with a list of messages")
    for key in held.keys() - _INPUT_KEYS:
        notes[f"unread_key:input.{key[:80]}"] += 1
    return held["messages"], held.get("tools")


def _conversations(
    prompt: object, chosen: object, rejected: object
) -> tuple[tuple[Message, ...], tuple[Message, ...], int]:
    """Return both conversations and how many messages of them are the prompt."""
    given = _messages(prompt, "prompt", "user")
    sides = {name: _messages(held, name, "assistant") for name, held in (("chosen", chosen), ("rejected", rejected))}
    if not given:
        texts = [name for name, held in (("chosen", chosen), ("rejected", rejected)) if isinstance(held, str)]
        if texts:
            raise PairRefused("no_prompt", f"there is no prompt, and {' and '.join(texts)} is text alone")
        both = [tuple(_paired(side, name)) for name, side in sides.items()]
        return both[0], both[1], common_prompt(*both)
    whole = {name: _behind(given, side, name, isinstance(prompt, str)) for name, side in sides.items()}
    both = [tuple(_paired(side, name)) for name, side in whole.items()]
    if not all(same_messages(one, other) for one, other in zip(both[0][: len(given)], both[1], strict=False)):
        raise PairRefused("prompt_contradicts_sides", "results behind the prompt give a call in it different ids")
    return both[0], both[1], len(given)


def _behind(prompt: Sequence[Message], side: Sequence[Message], name: str, prompt_is_text: bool) -> list[Message]:
    """Return prompt and ending; the side may be the ending alone, or the whole conversation."""
    if _begins_with(side, prompt):
        return list(side)
    first = side[0].role if side else None
    ends = (prompt[0], prompt[-1])
    repeats = first not in (None, "assistant") and any(same_messages(side[0], message) for message in ends)
    answers_nobody = first == "user" and (prompt_is_text or prompt[-1].role != "assistant")
    if first == "system" or repeats or answers_nobody:
        raise PairRefused(
            "prompt_contradicts_sides", f"{name} begins with a {first} message, but not with the whole prompt"
        )
    return [*prompt, *side]


def _begins_with(side: Sequence[Message], prompt: Sequence[Message]) -> bool:
    return len(side) >= len(prompt) and all(map(same_messages, side, prompt))


def _begins_with_text(side: object, prompt: str) -> bool:
    """Whether a side that is text begins with the prompt's text: a reply may, so it is only counted."""
    return isinstance(side, str) and side.startswith(prompt)


def _messages(held: object, name: str, role_of_text: str) -> list[Message]:
    if held is None:
        return []
    if isinstance(held, str):
        if not held:
            return []
        if held.lstrip()[:1] == "[" and _is_json_of_messages(held):
            raise PairRefused("json_text", f"{name} is a list of messages as JSON text")
        held = [{"role": role_of_text, "content": held}]
    raws = [held] if isinstance(held, dict) else held
    if not isinstance(raws, list):
        raise PairRefused("bad_pair", f"{name} is {kind_of(held)}, not text or messages")
    try:
        return [read_message(raw, index) for index, raw in enumerate(raws)]
    except Refused as refused:
        raise PairRefused(refused.reason, f"{name}: {refused.detail}") from refused


def _is_json_of_messages(text: str) -> bool:
    try:
        value = parse_json(text.encode()).value
    except Refused:
        return False
    return isinstance(value, list) and is_message_list(value)


def _paired(messages: Sequence[Message], name: str) -> list[Message]:
    try:
        return pair_results(messages)
    except Refused as refused:
        raise PairRefused(refused.reason, f"{name}: {refused.detail}") from refused
