"""A turn laid out as text: the prompt as inference would send it, the ending the model must write, and what is trained.

Prompt   The template over the messages before the turn, with its generation prompt. History is whatever the template
         makes of it for this very prompt, so a template that drops old reasoning is followed turn by turn.
Ending   What the template adds when the turn is there. It must continue the prompt exactly; where it does not (a
         generation prompt that closes the reasoning, a turn that holds some) the turn could not happen at inference
         and is refused, never guessed.
Target   From the end of the prompt, or from the turn's action, through the token that ends the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from traceforge.samples.encoding import TextEncoder
from traceforge.samples.refusal import Refused
from traceforge.samples.template import ChatMessage, ChatTemplate, TemplateFailure, merged, runs_of_one_role
from traceforge.samples.template_traits import TemplateTraits
from traceforge.samples.text_overlap import common_prefix_length, common_suffix_length
from traceforge.samples.turns import fenced_command_span

MERGED_MESSAGES = "merged_messages"
EOS_APPENDED = "eos_appended"
REASONING_NOT_RENDERED = "reasoning_not_rendered"
TEXT_NOT_RENDERED = "text_not_rendered"
TOOLS_NOT_RENDERED = "tools_not_rendered"

_ABSENT = "\ue000"  # a private-use character: no message begins or ends with it
_WAY_OUT = 'set model.template_file, or use data.rendering = "transcript", which needs a system and a user message only'

CharRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in template shape, up to and including the turn, with the log's flag of each."""

    messages: Sequence[ChatMessage]
    trained: Sequence[bool | None]
    tools: Sequence[dict[str, Any]] = ()
    trajectory_id: str = ""


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """The text of one sample.

    Args:
        text: prompt and ending.
        num_prompt_chars: where the ending begins.
        target: the characters to train, through the end of the turn's last token.
        untrained: for `loss_on = "all"`: what the generation prompt wrote, and messages the log flags as untrained.
        cuts: reason codes.
    """

    text: str
    num_prompt_chars: int
    target: CharRange
    untrained: tuple[CharRange, ...] = ()
    cuts: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """The text before the ending."""
        return self.text[: self.num_prompt_chars]

    @property
    def ending(self) -> str:
        """The text after the prompt."""
        return self.text[self.num_prompt_chars :]


class ChatLayout:
    """Lays out turns with one template."""

    def __init__(
        self, template: ChatTemplate, traits: TemplateTraits, encoder: TextEncoder, *, eos: str | None
    ) -> None:
        self._template = template
        self._traits = traits
        self._encoder = encoder
        self._eos = eos
        self._blamed: dict[tuple[str, str], int] = {}

    def lay_out(
        self, conversation: Conversation, *, target: Literal["turn", "action"], context_trained: bool
    ) -> TurnLayout:
        """Return the text of the last message's turn. `context_trained`: fill in `untrained` too.

        Raises:
            Refused: the template cannot express the conversation, or the turn does not follow from its prompt.
        """
        self._refuse_what_is_left_out(conversation)
        try:
            return self._lay_out(conversation, target, context_trained)
        except TemplateFailure as failure:
            alternating = _with_alternating_history(conversation)
            if len(alternating.messages) < len(conversation.messages):
                try:
                    layout = self._lay_out(alternating, target, context_trained)
                except TemplateFailure:
                    pass  # the first failure is the one about the messages as they are
                else:
                    return replace(layout, cuts=(MERGED_MESSAGES, *layout.cuts))
            raise Refused("template_error", self._blame(conversation, str(failure))) from failure

    def _lay_out(
        self, conversation: Conversation, target: Literal["turn", "action"], context_trained: bool
    ) -> TurnLayout:
        *history, turn = conversation.messages
        prompt = self._template.render(history, tools=conversation.tools, generation_prompt=True)
        full = self._template.render(conversation.messages, tools=conversation.tools)
        if not full.startswith(prompt):
            raise Refused("ending_does_not_follow_generation_prompt", _divergence(prompt, full))
        text, stop, cuts = self._with_terminator(full, len(prompt))
        if turn.get("reasoning_content", "").strip() not in text[len(prompt) :]:
            cuts = (*cuts, REASONING_NOT_RENDERED)
        # Reasoning that a log keeps inside the text may be taken apart by the template.
        if turn["content"].rpartition("</think>")[2].strip() not in text[len(prompt) :]:
            cuts = (*cuts, TEXT_NOT_RENDERED)
        if conversation.tools and not self._traits.renders_tools:
            cuts = (*cuts, TOOLS_NOT_RENDERED)
        start = len(prompt) if target == "turn" else self._action_start(conversation, full, len(prompt))
        untrained = self._untrained(conversation, prompt, full) if context_trained else ()
        return TurnLayout(text, len(prompt), (start, stop), untrained, cuts)

    def _with_terminator(self, full: str, num_prompt_chars: int) -> tuple[str, int, tuple[str, ...]]:
        """Return the text with the token that ends the turn, where that token stops, and reason codes."""
        rules = self._traits.ending
        if rules.closing and full.endswith(rules.closing, num_prompt_chars):
            full = full[: len(full) - len(rules.closing)]
        ending = full[num_prompt_chars:]
        found = self._encoder.final_special(ending)
        if found is not None:
            special = ending[slice(*found)]
            expected = (self._eos, None if rules.next_terminator is None else rules.next_terminator.strip())
            # Where turns have no terminator of their own, another special token at the end closes a call, not the turn.
            if rules.has_terminator or special in expected:
                return full, num_prompt_chars + found[1], ()
        if rules.next_terminator is not None:
            body = full[: len(full) - len(rules.tail)] if rules.tail and ending.endswith(rules.tail) else full
            text = body + rules.next_terminator
            return text, len(text), ()
        if self._eos is None:
            raise Refused(
                "no_terminator", "the template ends the turn with no special token and the tokenizer has no eos token"
            )
        return full + self._eos, len(full) + len(self._eos), (EOS_APPENDED,)

    def _action_start(self, conversation: Conversation, full: str, num_prompt_chars: int) -> int:
        *history, turn = conversation.messages
        if turn.get("tool_calls"):
            # Some templates refuse a turn with neither text nor calls.
            silent = {**turn, "content": turn["content"] or _ABSENT}
            del silent["tool_calls"]
            without_calls = self._template.render([*history, silent], tools=conversation.tools)
            return max(num_prompt_chars, common_prefix_length(full, without_calls))
        span = fenced_command_span(turn["content"])
        assert span is not None, "a turn without an action is refused before it is laid out"
        # Reasoning may quote the command; the text comes after it.
        start = full.rfind(turn["content"][slice(*span)], num_prompt_chars)
        if start < 0:
            raise Refused("no_action", "the template does not render the fenced command as it stands in the turn")
        return start

    def _untrained(self, conversation: Conversation, prompt: str, full: str) -> tuple[CharRange, ...]:
        """Return the ranges that training on the context leaves out.

        A flagged message is found by rendering the conversation with that message emptied: what differs is what it
        contributed. The header before it is the template's and stays; the token that ends a flagged turn goes with it.
        """
        messages = list(conversation.messages)
        bare = self._template.render(messages[:-1], tools=conversation.tools)
        ranges = [(common_prefix_length(bare, prompt), len(prompt))]
        for index, flag in enumerate(conversation.trained[:-1]):
            if flag is not False:
                continue
            other = self._with_emptied(conversation, index)
            start = common_prefix_length(full, other)
            stop = len(full) - common_suffix_length(full[start:], other[start:])
            if stop > start and messages[index]["role"] == "assistant":
                stop = self._stop_of_terminator(full, stop)
            if stop > start:
                ranges.append((start, stop))
        return tuple(ranges)

    def _with_emptied(self, conversation: Conversation, index: int) -> str:
        """Return the conversation as text with the message at `index` emptied of content, reasoning and calls."""
        messages, message = conversation.messages, conversation.messages[index]
        before, after = messages[:index], messages[index + 1 :]
        emptied = {key: value for key, value in message.items() if key not in ("reasoning_content", "tool_calls")}
        emptied["content"] = _ABSENT
        try:
            return self._template.render([*before, emptied, *after], tools=conversation.tools)
        except TemplateFailure:
            # Some templates refuse results without their calls: then the calls stay, under another name.
            arguments: object = {} if self._traits.arguments == "object" else "{}"
            nameless = {"name": _ABSENT, "arguments": arguments}
            calls = [{**call, "function": nameless} for call in message.get("tool_calls", ())]
            return self._template.render([*before, {**emptied, "tool_calls": calls}, *after], tools=conversation.tools)

    def _stop_of_terminator(self, text: str, position: int) -> int:
        indented = position + len(text[position:]) - len(text[position:].lstrip())
        for special in self._encoder.special_texts:
            if special and text.startswith(special, indented):
                return indented + len(special)
        return position

    def _refuse_what_is_left_out(self, conversation: Conversation) -> None:
        left_out = self._traits.left_out_roles & {message["role"] for message in conversation.messages}
        if left_out:
            role = min(left_out)
            raise Refused("role_not_rendered", f"the chat template leaves out messages of role {role}; {_WAY_OUT}")
        if not self._traits.renders_tool_calls and any("tool_calls" in message for message in conversation.messages):
            raise Refused("tool_calls_not_rendered", f"the chat template leaves out tool calls; {_WAY_OUT}")

    def _blame(self, conversation: Conversation, failure: str) -> str:
        """Return the failure with the first message that brings it up."""
        key = (conversation.trajectory_id, failure)
        if key not in self._blamed:
            self._blamed[key] = self._first_failing(conversation, failure)
        index = min(self._blamed[key], len(conversation.messages) - 1)
        role = conversation.messages[index]["role"]
        return f"the chat template fails at message {index} (role {role}) of {conversation.trajectory_id}: {failure}"

    def _first_failing(self, conversation: Conversation, failure: str) -> int:
        for count in range(1, len(conversation.messages) + 1):
            try:
                self._template.render(conversation.messages[:count], tools=conversation.tools)
            except TemplateFailure as error:
                if str(error) == failure:
                    return count - 1
        return len(conversation.messages) - 1


def _with_alternating_history(conversation: Conversation) -> Conversation:
    """Merge neighbours of one role before the turn; the turn itself is never merged into."""
    *history, turn = conversation.messages
    runs = runs_of_one_role(history)
    flags = [False if any(conversation.trained[index] is False for index in run) else None for run in runs]
    return replace(
        conversation,
        messages=[*(merged([history[index] for index in run]) for run in runs), turn],
        trained=[*flags, conversation.trained[-1]],
    )


def _divergence(prompt: str, full: str) -> str:
    shared = common_prefix_length(prompt, full)
    start = max(0, shared - 40)
    return (
        f"at inference the prompt ends {prompt[start:][-120:]!r}, the turn is rendered {full[start : shared + 80]!r}; "
        "check model.template_kwargs (such as enable_thinking) and whether the template renders reasoning"
    )
