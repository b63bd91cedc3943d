"""What a chat template does with each kind of message, found by rendering small conversations of made-up words.

Templates say nothing about themselves, and one that does not know a role or a tool call mostly leaves it out without a
word. What is left out here would be trained on as if it had never happened, so the renderer asks first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traceforge.samples.encoding import TextEncoder
from traceforge.samples.template import ArgumentsForm, ChatMessage, ChatTemplate, TemplateFailure
from traceforge.samples.text_overlap import common_prefix_length, common_suffix_length

_SYSTEM, _ASK, _REPLY, _ASK_AGAIN, _RESULT = "zqsystem", "zqask", "zqreply", "zqagain", "zqresult"
_TOOL, _KEY, _VALUE, _ABOUT = "zqtool", "zqkey", "zqvalue", "zqabout"
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": _ABOUT,
            "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}, "required": [_KEY]},
        },
    }
]


@dataclass(frozen=True, slots=True)
class TurnEnding:
    """How the template ends a turn.

    Args:
        has_terminator: a turn's own text ends with a special token.
        closing: what comes behind that token only because the conversation ends there, as an end-of-text token does.
        next_terminator: what a following message puts right behind a turn that has no terminator, or None.
        tail: what comes behind such a turn when it is the last message.
    """

    has_terminator: bool
    closing: str = ""
    next_terminator: str | None = None
    tail: str = ""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What the template renders. Where a probe made it raise, True: the real conversation will say it better.

    Args:
        left_out_roles: roles whose content never appears. A template made for lists of content parts leaves out all.
        arguments: the form of call arguments that comes out as JSON quoted once.
        ending: how a turn ends.
    """

    left_out_roles: frozenset[str]
    renders_tool_calls: bool
    renders_tools: bool
    arguments: ArgumentsForm
    ending: TurnEnding


def read_traits(template: ChatTemplate, encoder: TextEncoder, *, eos: str | None) -> TemplateTraits:
    """Return what the template renders; `eos` is the text of the tokenizer's end token, or None.

    Raises:
        TemplateError: the tokenizer has no template.
    """
    arguments, renders_calls = _tool_calls(template)
    probes: list[tuple[str, list[ChatMessage], str]] = [
        ("system", [{"role": "system", "content": _SYSTEM}, _user(_ASK)], _SYSTEM),
        ("user", [_user(_ASK), _assistant(_REPLY)], _ASK),
        ("assistant", [_user(_ASK), _assistant(_REPLY)], _REPLY),
        ("tool", [_user(_ASK), _calling(arguments), _tool_result()], _RESULT),
    ]
    return TemplateTraits(
        left_out_roles=frozenset(
            role
            for role, messages, word in probes
            if not _shows(template, messages, word, tools=_TOOLS if role == "tool" else ())
        ),
        renders_tool_calls=renders_calls,
        renders_tools=_shows(template, [_user(_ASK)], _ABOUT, tools=_TOOLS),
        arguments=arguments,
        ending=_turn_ending(template, encoder, eos),
    )


def default_system_prompt(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> str | None:
    """Return the system text that the template adds to a conversation that has none, or None (also without a template).

    That is what stands before the first user message and does not stand before the second, without special tokens
    and the word `system` of the header.
    """
    if not tokenizer.chat_template:
        return None
    template = ChatTemplate(tokenizer, template_kwargs or {})
    first = _rendered(template, [_user(_ASK)])
    later = _rendered(template, [_user(_ASK), _assistant(_REPLY), _user(_ASK_AGAIN)])
    if first is None or later is None or _ASK not in first or _ASK_AGAIN not in later:
        return None
    before_first, before_later = first[: first.find(_ASK)], later[: later.find(_ASK_AGAIN)]
    stop = len(before_first) - common_suffix_length(before_first, before_later)
    specials = re.compile("|".join(re.escape(text) for text in TextEncoder(tokenizer).special_texts if text) or r"\Z")
    # The two may also share the last letters of two different special tokens.
    stop = next((found.end() for found in specials.finditer(before_first) if found.start() < stop < found.end()), stop)
    pieces = specials.split(before_first[:stop])
    texts = [piece.strip().removeprefix("system").strip() for piece in pieces]
    return "\n".join(text for text in texts if text) or None


def _tool_calls(template: ChatTemplate) -> tuple[ArgumentsForm, bool]:
    """Return the form of arguments to give, and whether calls are rendered at all.

    Given an object, a template that expects text raises or prints it as Python does (`{'key': 'value'}`); given text,
    one that expects an object prints a quoted string.
    """
    seen = False
    forms: tuple[ArgumentsForm, ...] = ("object", "text")
    for form in forms:
        text = _rendered(template, [_user(_ASK), _calling(form)], tools=_TOOLS)
        if text is None:
            seen = True
        elif _VALUE in text:
            seen = True
            if f"'{_KEY}': '" not in text and f'\\"{_KEY}' not in text:
                return form, True
    return "object", seen


def _turn_ending(template: ChatTemplate, encoder: TextEncoder, eos: str | None) -> TurnEnding:
    last = _rendered(template, [_user(_ASK), _assistant(_REPLY)])
    followed = _rendered(template, [_user(_ASK), _assistant(_REPLY), _user(_ASK_AGAIN)])
    if last is None or _REPLY not in last:
        return TurnEnding(has_terminator=True)
    tail = last[last.rfind(_REPLY) + len(_REPLY) :]
    between = ""
    if followed is not None and _REPLY in followed and _ASK_AGAIN in followed:
        between = followed[followed.rfind(_REPLY) + len(_REPLY) : followed.rfind(_ASK_AGAIN)]
    if encoder.final_special(tail) is not None:
        # What both endings share holds the terminator; what only the last message has is no part of the turn.
        shared = tail[: common_prefix_length(tail, between)]
        stop = max((shared.rfind(text) + len(text) for text in encoder.special_texts if text in shared), default=None)
        if stop is None:
            return TurnEnding(has_terminator=True)
        stop += len(shared[stop:]) - len(shared[stop:].lstrip())
        return TurnEnding(has_terminator=True, closing=tail[stop:])
    indent = len(between) - len(between.lstrip())
    special = next((text for text in encoder.special_texts if text and between.startswith(text, indent)), None)
    opening = last[: last.find(_ASK)] if _ASK in last else ""
    # A token that also opens the first user message is a header: a model that writes it does not stop at inference,
    # unless it is the end token itself.
    if special is None or (special != eos and special in opening):
        return TurnEnding(has_terminator=False, tail=tail)
    return TurnEnding(has_terminator=False, next_terminator=between[: indent + len(special)], tail=tail)


def _shows(
    template: ChatTemplate, messages: Sequence[ChatMessage], word: str, *, tools: Sequence[dict[str, Any]] = ()
) -> bool:
    text = _rendered(template, messages, tools=tools)
    return text is None or word in text


def _rendered(
    template: ChatTemplate, messages: Sequence[ChatMessage], *, tools: Sequence[dict[str, Any]] = ()
) -> str | None:
    try:
        return template.render(messages, tools=tools)
    except TemplateFailure:
        return None


def _user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


def _assistant(content: str) -> ChatMessage:
    return {"role": "assistant", "content": content}


def _calling(form: ArgumentsForm) -> ChatMessage:
    arguments: object = {_KEY: _VALUE} if form == "object" else f'{{"{_KEY}": "{_VALUE}"}}'
    # Nine letters and digits: some templates check the length of the id.
    call = {"id": "zqcall001", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _tool_result() -> ChatMessage:
    return {"role": "tool", "content": _RESULT, "tool_call_id": "zqcall001", "name": _TOOL}
