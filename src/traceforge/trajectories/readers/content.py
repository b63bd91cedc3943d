"""Content parts, reasoning in all its places, tool calls and tool schemas, each as the record wants them.

Text       The texts of content parts are joined without anything between them. null is "".
Reasoning  Several reasoning blocks of one message are joined by a blank line. Signatures and encrypted blocks go.
Arguments  A string stays as logged, valid JSON or not; an object becomes compact JSON text.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from traceforge.trajectories.record import ToolCall
from traceforge.trajectories.refusals import Refused
from traceforge.trajectories.text import kind_of, parse_json

_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

_TEXT_TYPES = (None, "text", "input_text", "output_text", "refusal")
_REASONING_TYPES = ("reasoning", "thinking", "reasoning_text", "summary_text", "reasoning.text", "reasoning.summary")
_ENCRYPTED_TYPES = ("redacted_thinking", "reasoning.encrypted")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_REASONING_BLOCKS = ("thinking_blocks", "reasoning_details")
_INLINE = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)

# Keys of a JSON schema whose value is data, not a schema: a null there was meant.
_SCHEMA_DATA = ("default", "const", "enum", "examples")
# Keys whose value maps names a person chose to schemas; a parameter may well be called `default`.
_SCHEMA_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def read_content(content: object, index: int) -> tuple[str, str | None]:
    """Return the text of a message's content, and the reasoning that its parts hold.

    Raises:
        Refused: `image_content`, `unsupported_content` or `bad_content`, naming message `index`.
    """
    if content is None:
        return "", None
    if isinstance(content, str):
        return content, None
    if not isinstance(content, list):
        raise Refused("bad_content", f"message {index}: content is {kind_of(content)}")
    texts: list[str] = []
    reasoning: list[str] = []
    for position, part in enumerate(content):
        where = f"message {index}, content part {position}"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise Refused("bad_content", f"{where} is {kind_of(part)}")
        kind = part.get("type")
        if kind in _REASONING_TYPES:
            reasoning.extend(_block_texts(part))
        elif kind in _TEXT_TYPES:
            texts.append(_part_text(part, where))
        elif kind not in _ENCRYPTED_TYPES:
            reason = "image_content" if "image" in str(kind) else "unsupported_content"
            raise Refused(reason, f"{where} is of type {str(kind)[:80]!r}")
    return "".join(texts), joined_reasoning(reasoning)


def _part_text(part: dict[str, Any], where: str) -> str:
    text = part.get("text", part.get("refusal"))
    if text is None and ("text" in part or "refusal" in part):
        return ""
    if not isinstance(text, str):
        raise Refused("bad_content", f"{where} holds no text")
    return text


def joined_reasoning(blocks: Iterable[str]) -> str | None:
    """Return reasoning blocks joined by a blank line, or None if nothing but space is in them."""
    kept = [block for block in blocks if block.strip()]
    return "\n\n".join(kept) if kept else None


def _block_texts(block: object) -> list[str]:
    if isinstance(block, str):
        return [block]
    if not isinstance(block, dict):
        return []
    for name in ("text", "thinking", "reasoning", "content", "summary"):
        held = block.get(name)
        if isinstance(held, str) and held.strip():
            return [held]
        if isinstance(held, list) and held:
            return [text for each in held for text in _block_texts(each)]
    return []


def stated_reasoning(message: dict[str, Any]) -> str | None:
    """Return the reasoning a message states beside its content.

    Looked for in the message itself, then in the provider's reply that the log kept (`extra.response`), then in
    `provider_specific_fields`; the first place that holds any text wins, since they repeat each other.
    """
    for holder in (message, _kept_reply(message), message.get("provider_specific_fields")):
        if not isinstance(holder, dict):
            continue
        for name in _REASONING_FIELDS:
            held = holder.get(name)
            if isinstance(held, str) and held.strip():
                return held
        for name in _REASONING_BLOCKS:
            held = holder.get(name)
            if isinstance(held, list):
                reasoning = joined_reasoning(text for block in held for text in _block_texts(block))
                if reasoning is not None:
                    return reasoning
    return None


def _kept_reply(message: dict[str, Any]) -> object:
    extra = message.get("extra")
    response = extra.get("response") if isinstance(extra, dict) else None
    choices = response.get("choices") if isinstance(response, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return first.get("message") if isinstance(first, dict) else None


def split_inline_reasoning(text: str, stated: str | None) -> tuple[str, str | None]:
    """Return the text without a leading `<think>…</think>`, and the reasoning.

    Where the message states its reasoning elsewhere too, the inline block goes only if it repeats it.
    """
    if "</think>" not in text:
        return text, stated
    match = _INLINE.match(text)
    if match is None:
        return text, stated
    inline = match[1].strip("\n")
    if stated is not None and inline.strip() and inline.strip() != stated.strip():
        return text, stated
    return text[match.end() :], stated if stated is not None else joined_reasoning([inline])


def read_arguments(arguments: object) -> str:
    """Return a call's arguments as JSON text: a string as it is, null as an empty object."""
    if isinstance(arguments, str):
        return arguments
    return "{}" if arguments is None else _compact.encode(arguments)


def read_tool_calls(message: dict[str, Any], index: int) -> tuple[ToolCall, ...]:
    """Return the tool calls of an assistant message, legacy `function_call` included.

    Raises:
        Refused: `bad_tool_call` or `unsupported_content`, naming message `index`.
    """
    calls = message.get("tool_calls") or []
    legacy = message.get("function_call")
    if not calls and legacy is not None:
        calls = [{"function": legacy}]
    if not isinstance(calls, list):
        raise Refused("bad_tool_call", f"message {index}: tool_calls is {kind_of(calls)}, not a list")
    return tuple(read_tool_call(call, f"message {index}, call {position}") for position, call in enumerate(calls))


def read_tool_call(call: object, where: str) -> ToolCall:
    """Return one call given as `{id, function: {name, arguments}}` or `{id, name, arguments}`."""
    if not isinstance(call, dict):
        raise Refused("bad_tool_call", f"{where} is {kind_of(call)}")
    kind = call.get("type")
    if kind not in (None, "function", "function_call"):
        raise Refused("unsupported_content", f"{where} is of type {str(kind)[:80]!r}")
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise Refused("bad_tool_call", f"{where} names no function")
    return ToolCall(name=name, arguments=read_arguments(function.get("arguments")), id=read_id(call.get("id"), where))


def read_id(held: object, where: str) -> str | None:
    """Return a call id; numbers become text, an empty one is none."""
    if held is None or held == "":
        return None
    if isinstance(held, (str, int)):
        return str(held)
    raise Refused("bad_tool_call", f"{where}: the id is {kind_of(held)}")


def read_tools(tools: object, notes: Counter[str]) -> tuple[dict[str, Any], ...]:
    """Return OpenAI function schemas, each with the keys it was declared with.

    A column store gives every tool the keys of all tools, with null where a tool has none: those nulls are dropped, and
    counted in `notes` as `null_schema_keys`.

    Raises:
        Refused: `bad_tools`.
    """
    if isinstance(tools, str):
        tools = parse_text(tools, "tools", notes)
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise Refused("bad_tools", f"tools is {kind_of(tools)}, not a list")
    return tuple(_read_tool(tool, position, notes) for position, tool in enumerate(tools))


def _read_tool(tool: object, position: int, notes: Counter[str]) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise Refused("bad_tools", f"tool {position} is {kind_of(tool)}")
    if tool.get("type") not in (None, "function"):
        raise Refused("bad_tools", f"tool {position} is of type {str(tool['type'])[:80]!r}, not a function")
    wrapped = tool.get("function") is not None
    function = tool["function"] if wrapped else {key: value for key, value in tool.items() if key != "type"}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("bad_tools", f"tool {position} names no function")
    if "input_schema" in function:
        raise Refused("bad_tools", f"tool {position} is declared by `input_schema`: an Anthropic tool, not a function")
    if not wrapped:
        return {"type": "function", "function": _without_nulls(function, notes)}
    return {"type": "function", **_without_nulls(tool, notes)}


def _without_nulls(schema: Any, notes: Counter[str], *, keys_are_names: bool = False) -> Any:
    if isinstance(schema, list):
        return [_without_nulls(each, notes) for each in schema]
    if isinstance(schema, float) and not math.isfinite(schema):
        raise Refused("bad_tools", f"a schema holds {schema}, which JSON cannot express")
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _SCHEMA_DATA and not keys_are_names:
            kept[key] = _finite(value)
        elif value is None:
            notes["null_schema_keys"] += 1
        else:
            kept[key] = _without_nulls(value, notes, keys_are_names=key in _SCHEMA_NAMES and not keys_are_names)
    return kept


def _finite(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        raise Refused("bad_tools", f"a schema holds {data}, which JSON cannot express")
    for each in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        _finite(each)
    return data


def parse_text(text: str, name: str, notes: Counter[str]) -> Any:
    """Return the JSON value of a string field `name` that holds JSON, with repairs counted in `notes`."""
    try:
        parsed = parse_json(text.encode())
    except Refused as refused:
        raise Refused(refused.reason, f"the JSON text in {name}: {refused.detail}") from refused
    if parsed.replaced_surrogates:
        notes["replaced_surrogates"] += parsed.replaced_surrogates
    return parsed.value
