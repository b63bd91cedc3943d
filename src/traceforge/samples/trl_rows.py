"""One sample or pair as a standard conversational row (prompt-completion, preference) that TRL and others read.

Objects  Tool arguments are objects there and JSON strings in the trajectory; a string that is no JSON object has no
         such form and is refused, never guessed.
Tools    One JSON string, which TRL parses itself: a column of schemas would take the union of all rows' keys (and fail
         to load where the first rows have none). `datasets.load_dataset("json", ...)` reads the rest as it stands;
         where only later rows call tools, pass `features=Features({"prompt": List(Json()), "completion":
         List(Json()), "tools": Value("string")})`.
"""

from __future__ import annotations

import json
from typing import Any

from traceforge.trajectories.record import Message, ToolCall, Trajectory


class UnparsableArgumentsError(ValueError):
    """The arguments of a tool call are not a JSON object."""


def trl_row(trajectory: Trajectory, message_index: int) -> dict[str, Any]:
    """Return `{prompt, completion, tools}`: history, the turn as the one message, and the schemas as JSON.

    Raises:
        UnparsableArgumentsError: a tool call in the history or the turn has arguments that are not a JSON object.
    """
    return {
        "prompt": [_message(message) for message in trajectory.messages[:message_index]],
        "completion": [_message(trajectory.messages[message_index])],
        "tools": json.dumps(trajectory.tools, ensure_ascii=False),
    }


def trl_pair_row(chosen: Trajectory, rejected: Trajectory, prompt_messages: int) -> dict[str, Any]:
    """Return `{prompt, chosen, rejected, tools}`: the messages both share, then the two endings.

    Raises:
        UnparsableArgumentsError: see `trl_row`.
    """
    return {
        "prompt": [_message(message) for message in chosen.messages[:prompt_messages]],
        "chosen": [_message(message) for message in chosen.messages[prompt_messages:]],
        "rejected": [_message(message) for message in rejected.messages[prompt_messages:]],
        "tools": json.dumps(chosen.tools, ensure_ascii=False),
    }


def _message(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    return row


def _tool_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except ValueError as error:
        raise UnparsableArgumentsError(str(error)) from error
    if not isinstance(arguments, dict):
        raise UnparsableArgumentsError(f"arguments are a JSON {type(arguments).__name__}, not an object")
    named = {"id": call.id} if call.id is not None else {}
    return {**named, "type": "function", "function": {"name": call.name, "arguments": arguments}}
