"""mini-swe-agent trajectories: version 1 (text actions), version 2 (tool calls, text, Responses API), bare lists.

Version 1   Text only. The action is a fenced block in the assistant's text, the observation the next user message, and
            the reasoning hides in `extra.response`, the provider's whole reply.
Version 2   `tool_calls` answered by role `tool`; or text with observations as user messages; or whole Responses objects
            without a role. The tools are never stored: it is always the one `bash` function.
Variant     `extra.actions[]` with `function: {name, arguments}` and no `tool_calls`: the calls are made from it.
Exit        Role `exit` ends a version 2 log. It is no message: only its status is kept. The calls of the last turn stay
            unanswered, since the submission ends the run inside them.
Errors      A format error is a user message the environment wrote (the reply it complains about is not in a version 2
            log), so user follows user.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec

from traceforge.trajectories.readers.chat import is_message_list, read_messages, task_of
from traceforge.trajectories.readers.content import (
    joined_reasoning,
    read_arguments,
    read_content,
    read_id,
    read_tool_call,
)
from traceforge.trajectories.readers.messages import pair_results, read_message
from traceforge.trajectories.readers.reader import Origin, Reader
from traceforge.trajectories.record import Message, ToolCall, Trajectory
from traceforge.trajectories.refusals import Refused

VERSION_1 = "mini-swe-agent-v1"
VERSION_2 = "mini-swe-agent-v2"

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""The tool that version 2 declares to the model and never writes to its logs."""

_INFO_KEYS = frozenset(("exit_status", "submission", "model_stats", "mini_version", "config"))
_TEXT_MARKS = (
    "MINI_SWE_AGENT_FINAL_OUTPUT",
    "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    "```mswea_bash_command",
)


def matches(value: Any) -> bool:
    """Whether a value is a trajectory of mini-swe-agent, with or without its wrapper."""
    if isinstance(value, list):
        return is_message_list(value) and _has_text_marks(value)
    if not isinstance(value, dict):
        return False
    version = value.get("trajectory_format")
    if isinstance(version, str):
        return version.startswith("mini-swe-agent")
    info = value.get("info")
    return isinstance(value.get("messages"), list) and isinstance(info, dict) and bool(_INFO_KEYS & info.keys())


def _has_text_marks(messages: list[Any]) -> bool:
    texts = [item["content"] for item in messages if isinstance(item, dict) and isinstance(item.get("content"), str)]
    return any(text.startswith("<returncode>") or any(mark in text for mark in _TEXT_MARKS) for text in texts)


def read(value: Any, origin: Origin) -> Trajectory:
    """Return the trajectory of one log.

    Raises:
        Refused: with the reason, naming the message.
    """
    log: dict[str, Any] = value if isinstance(value, dict) else {"messages": value}
    raw_messages = read_messages(log.get("messages"), origin)
    info = _object(log.get("info"))
    kept = [(index, raw) for index, raw in enumerate(raw_messages) if not _is_exit(raw)]
    messages = pair_results([_read_message(raw, index) for index, raw in kept])
    calls_tools = any(message.tool_calls or message.role == "tool" for message in messages)
    messages = _mark_observations(messages, [raw for _, raw in kept], calls_tools=calls_tools)
    instance = log.get("instance_id")
    wanted = instance if isinstance(instance, str) and instance else origin.stem
    undeclared = {call.name for message in messages for call in message.tool_calls} - {"bash"}
    if undeclared:
        origin.notes["calls_of_undeclared_tools"] += 1
    return Trajectory(
        trajectory_id=wanted,
        task_id=task_of(wanted),
        source_format=_version(log, raw_messages),
        source_file=origin.file,
        model=_model(info, raw_messages),
        scaffold=_scaffold(info),
        tools=(BASH_TOOL,) if calls_tools else (),
        messages=tuple(messages),
        exit_status=_exit_status(info, raw_messages),
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _extra(raw: Any) -> dict[str, Any]:
    return _object(_object(raw).get("extra"))


def _is_exit(raw: Any) -> bool:
    return isinstance(raw, dict) and raw.get("role") == "exit"


def _read_message(raw: Any, index: int) -> Message:
    if isinstance(raw, dict) and raw.get("object") == "response":
        return _read_response(raw, index)
    if isinstance(raw, dict) and raw.get("type") == "function_call_output":
        content, _ = read_content(raw.get("output"), index)
        answered = read_id(raw.get("call_id"), f"message {index}")
        return Message(role="tool", content=content, tool_call_id=answered, observation=True)
    message = read_message(raw, index)
    if message.role != "assistant" or message.tool_calls:
        return message
    return msgspec.structs.replace(message, tool_calls=_calls_from_actions(raw, index))


def _calls_from_actions(raw: dict[str, Any], index: int) -> tuple[ToolCall, ...]:
    actions = _extra(raw).get("actions")
    calls = []
    for place, action in enumerate(actions if isinstance(actions, list) else []):
        where = f"message {index}, action {place}"
        if not isinstance(action, dict):
            raise Refused("bad_tool_call", f"{where} is not an object")
        call_id = action.get("tool_call_id", action.get("id"))
        if action.get("function") is not None:
            calls.append(read_tool_call({"id": call_id, "function": action["function"]}, where))
        elif call_id is not None and "command" in action:
            arguments = read_arguments({"command": action["command"]})
            calls.append(ToolCall(name="bash", arguments=arguments, id=read_id(call_id, where)))
    return tuple(calls)


def _read_response(raw: dict[str, Any], index: int) -> Message:
    output = raw.get("output")
    if not isinstance(output, list):
        raise Refused("bad_message", f"message {index}: a response without a list of output items")
    texts: list[str] = []
    reasoning: list[str | None] = []
    calls: list[ToolCall] = []
    for place, item in enumerate(output):
        where = f"message {index}, output {place}"
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "message":
            text, thought = read_content(item.get("content"), index)
            texts.append(text)
            reasoning.append(thought)
        elif kind == "reasoning":
            # The text itself if the provider shows it, else its summary; encrypted reasoning is nobody's to read.
            reasoning.append(read_content([item], index)[1])
        elif kind == "function_call":
            calls.append(read_tool_call({**item, "id": item.get("call_id", item.get("id"))}, where))
        else:
            raise Refused("unsupported_content", f"{where} is of type {str(kind)[:80]!r}")
    return Message(
        role="assistant",
        content="".join(texts),
        reasoning=joined_reasoning(each for each in reasoning if each is not None),
        tool_calls=tuple(calls),
    )


def _mark_observations(messages: list[Message], raws: list[Any], *, calls_tools: bool) -> list[Message]:
    # Every user message that the environment wrote: in a text scaffold all after the first answer; elsewhere those the
    # log marks as a format error or gives a return code.
    answered = False
    marked = []
    for message, raw in zip(messages, raws, strict=True):
        marked.append(message)
        answered = answered or message.role == "assistant"
        if message.role == "user":
            extra = _extra(raw)
            from_environment = extra.get("interrupt_type") == "FormatError" or "returncode" in extra
            if from_environment or (answered and not calls_tools):
                marked[-1] = msgspec.structs.replace(message, observation=True)
    return marked


def _version(log: dict[str, Any], raw_messages: list[Any]) -> str:
    stated = log.get("trajectory_format")
    if isinstance(stated, str):
        return VERSION_1 if stated == "mini-swe-agent-1" else VERSION_2
    is_second = any(
        _is_exit(raw)
        or _object(raw).get("object") == "response"
        or _object(raw).get("role") == "tool"
        or "actions" in _extra(raw)
        for raw in raw_messages
    )
    return VERSION_2 if is_second else VERSION_1


def _model(info: dict[str, Any], raw_messages: list[Any]) -> str | None:
    named = _object(_object(info.get("config")).get("model")).get("model_name")
    replies = (_object(_extra(raw).get("response")).get("model") for raw in raw_messages)
    responses = (raw.get("model") for raw in raw_messages if _object(raw).get("object") == "response")
    return next((name for name in chain((named,), replies, responses) if isinstance(name, str) and name), None)


def _scaffold(info: dict[str, Any]) -> str:
    version = info.get("mini_version")
    return f"mini-swe-agent {version}" if isinstance(version, str) and version else "mini-swe-agent"


def _exit_status(info: dict[str, Any], raw_messages: list[Any]) -> str | None:
    at_exit = (_extra(raw).get("exit_status") for raw in reversed(raw_messages) if _is_exit(raw))
    stated = chain((info.get("exit_status"),), at_exit)
    return next((status for status in stated if isinstance(status, str) and status), None)


READER = Reader(name="mini-swe-agent", matches=matches, read=read)
