"""The model's chat template: messages in, the text that inference would see out.

Text     Always rendered as text (`tokenize = False`); `encoding` makes the tokens, never the template call.
Messages Content is a string, never None; arguments of a call are an object, or its JSON text for a template that asks
         for text (`template_traits` finds out which), so every template quotes them once.
Markers  Nothing depends on `{% generation %}`: hardly any template has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Literal

from traceforge.errors import ConfigError, TemplateError
from traceforge.trajectories.record import Message, ToolCall
from traceforge.trajectories.text import repair_surrogates

ChatMessage = dict[str, Any]
ArgumentsForm = Literal["object", "text"]

# Arguments of the template call that the renderer sets itself.
_OWN_ARGUMENTS = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
_MERGED_ROLES = frozenset({"system", "user", "assistant"})


class TemplateFailure(Exception):
    """The template raised; the text is the template's own message. `layout` makes a refusal of it."""


class ChatTemplate:
    """A tokenizer's chat template with fixed keyword arguments."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> None:
        taken = sorted(_OWN_ARGUMENTS & template_kwargs.keys())
        if taken:
            raise ConfigError(
                f"model.template_kwargs.{taken[0]} is set by the renderer and cannot be given",
                hint="template_kwargs are the template's own switches, such as enable_thinking = false",
            )
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)

    def render(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[dict[str, Any]] = (), generation_prompt: bool = False
    ) -> str:
        """Return the conversation as text; with `generation_prompt`, as it stands when the model begins its turn.

        Raises:
            TemplateError: the tokenizer has no template.
            TemplateFailure: the template raised.
        """
        if not self._tokenizer.chat_template:
            raise TemplateError(
                f"{self._tokenizer.name_or_path or 'the tokenizer'}: no chat template",
                hint="set model.template_file to a Jinja template that fits the model",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        except Exception as error:  # a template can raise anything, from its own raise_exception to a TypeError
            raise TemplateFailure(str(error).strip() or type(error).__name__) from error
        return valid_unicode(text)


def chat_messages(messages: Sequence[Message], arguments: ArgumentsForm = "object") -> list[ChatMessage]:
    """Return the messages in the shape that chat templates read."""
    names = {call.id: call.name for message in messages for call in message.tool_calls if call.id is not None}
    return [_chat_message(message, names, arguments) for message in messages]


def _chat_message(message: Message, names: Mapping[str, str], arguments: ArgumentsForm) -> ChatMessage:
    shaped: ChatMessage = {"role": message.role, "content": message.content or ""}
    if message.reasoning:
        shaped["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shaped["tool_calls"] = [_call(call, arguments) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shaped["tool_call_id"] = message.tool_call_id
        if message.role == "tool" and message.tool_call_id in names:
            shaped["name"] = names[message.tool_call_id]
    return shaped


def _call(call: ToolCall, arguments: ArgumentsForm) -> dict[str, Any]:
    parsed = parsed_arguments(call.arguments)
    given: object = parsed if arguments == "object" else json.dumps(parsed, ensure_ascii=False)
    shaped: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": given}}
    return shaped if call.id is None else {"id": call.id, **shaped}


def parsed_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; text that is not a JSON object comes back under `_raw`.

    An escape of half a surrogate pair inside the arguments becomes U+FFFD, as everywhere else.
    """
    try:
        parsed = json.loads(repair_surrogates(arguments.encode())[0])
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"_raw": arguments}


def runs_of_one_role(messages: Sequence[ChatMessage]) -> list[list[int]]:
    """Return the indices grouped into runs of neighbours of one role.

    Tool results stay apart: each answers its own call.
    """
    runs: list[list[int]] = []
    for index, message in enumerate(messages):
        if runs and message["role"] == messages[runs[-1][-1]]["role"] and message["role"] in _MERGED_ROLES:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def merged(messages: Sequence[ChatMessage]) -> ChatMessage:
    """Return a run of messages of one role as one message, texts joined by a blank line."""
    return reduce(_joined, messages)


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    joined = {**first, **second}
    for key in ("content", "reasoning_content"):
        texts = [message[key] for message in (first, second) if message.get(key)]
        if key in joined:
            joined[key] = "\n\n".join(texts)
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    return joined


def valid_unicode(text: str) -> str:
    """Return the text with each lone surrogate as U+FFFD; escapes in JSON arguments or schemas can hold one."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
