"""Chat messages of every dialect to `Message`, and tool results paired with their calls.

Roles    developer is system, function is tool. An unknown role refuses the trajectory.
Pairing  By id, in any order: a swapped pair of results stays as logged. A call without an id takes the id of the result
         that answers it by order, a result without one takes its call's. A result that no open call asked for refuses
         the trajectory. Calls nobody answered stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from traceforge.trajectories.readers.content import (
    read_content,
    read_id,
    read_tool_calls,
    split_inline_reasoning,
    stated_reasoning,
)
from traceforge.trajectories.record import Message, Role, ToolCall
from traceforge.trajectories.refusals import Refused
from traceforge.trajectories.text import kind_of

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TRAINED_FIELDS = ("weight", "loss", "train")


def read_message(raw: object, index: int) -> Message:
    """Return one chat message; `index` is its place in the log, for refusals.

    Raises:
        Refused: the message holds something that a record cannot express.
    """
    if not isinstance(raw, dict):
        raise Refused("bad_message", f"message {index} is {kind_of(raw)}, not an object")
    role = _role(raw, index)
    content, reasoning = read_content(raw.get("content"), index)
    trained = _trained(raw, index)
    if role == "assistant":
        return assistant_message(raw, index, content=content, reasoning=reasoning, trained=trained)
    if reasoning is not None:
        raise Refused("unsupported_content", f"message {index}: a {role} message holds reasoning")
    if role == "tool":
        answered = read_id(raw.get("tool_call_id"), f"message {index}")
        return Message(role=role, content=content, tool_call_id=answered, trained=trained, observation=True)
    return Message(role=role, content=content, trained=trained)


def assistant_message(
    raw: dict[str, Any], index: int, *, content: str, reasoning: str | None, trained: bool | None
) -> Message:
    """Return an assistant's message; `reasoning` is what its content parts held."""
    if not content and isinstance(raw.get("refusal"), str):
        content = raw["refusal"]
    content, reasoning = split_inline_reasoning(content, stated_reasoning(raw) or reasoning)
    return Message(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=read_tool_calls(raw, index),
        trained=trained,
    )


def _role(raw: dict[str, Any], index: int) -> Role:
    held = raw.get("role")
    role = _ROLES.get(held) if isinstance(held, str) else None
    if role is None:
        raise Refused("unknown_role", f"message {index} has role {str(held)[:80]!r}")
    return role


def _trained(raw: dict[str, Any], index: int) -> bool | None:
    flags: set[bool] = set()
    for name in _TRAINED_FIELDS:
        if name not in raw or raw[name] is None:
            continue
        held = raw[name]
        if not isinstance(held, (bool, int, float)) or held not in (0, 1):
            raise Refused("bad_flag", f"message {index}: {name} is {str(held)[:80]!r}")
        flags.add(bool(held))
    if len(flags) > 1:
        raise Refused("bad_flag", f"message {index}: {', '.join(_TRAINED_FIELDS)} contradict each other")
    return flags.pop() if flags else None


def pair_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with every tool result paired with a call of an earlier turn.

    Raises:
        Refused: `orphan_tool_result`, naming the message.
    """
    open_calls: dict[tuple[int, int], str | None] = {}
    call_ids: dict[tuple[int, int], str] = {}
    paired = list(messages)
    for index, message in enumerate(messages):
        if message.role == "assistant":
            open_calls.update({(index, place): call.id for place, call in enumerate(message.tool_calls)})
        elif message.role == "tool":
            place = _answered(open_calls, message.tool_call_id)
            if place is None:
                named = "without an id" if message.tool_call_id is None else f"for call {message.tool_call_id[:80]!r}"
                raise Refused("orphan_tool_result", f"message {index}: a tool result {named}, which no open call has")
            call_id = open_calls.pop(place)
            if call_id is None and message.tool_call_id is not None:
                call_ids[place] = message.tool_call_id
            elif call_id is not None and message.tool_call_id is None:
                paired[index] = msgspec.structs.replace(message, tool_call_id=call_id)
    for index in {turn for turn, _ in call_ids}:
        calls = tuple(
            _with_id(call, call_ids.get((index, place))) for place, call in enumerate(paired[index].tool_calls)
        )
        paired[index] = msgspec.structs.replace(paired[index], tool_calls=calls)
    return paired


def _answered(open_calls: dict[tuple[int, int], str | None], result_id: str | None) -> tuple[int, int] | None:
    # What only order can pair belongs to the newest turn with an open call, and there to the first one.
    if result_id is not None:
        for place, call_id in open_calls.items():
            if call_id == result_id:
                return place
    candidates = [place for place, call_id in open_calls.items() if call_id is None or result_id is None]
    if not candidates:
        return None
    newest = max(turn for turn, _ in candidates)
    return min(place for place in candidates if place[0] == newest)


def _with_id(call: ToolCall, call_id: str | None) -> ToolCall:
    return call if call_id is None else msgspec.structs.replace(call, id=call_id)
