"""Rendering: one turn of a trajectory to one sample, tokens and weights.

    trajectory ─▶ length policy ─▶ layout (text, target) ─▶ tokens ─▶ weights ─▶ Sample | Refusal

Tokens   Prompt and ending are tokenised jointly where the prompt's own ids lead the result. Where a token would span
         the border, prompt and ending are tokenised apart, because at inference the prompt's tokens are already there.
Weights  Every token that shares a character with the target; by position in the sequence, never by token id, so a
         padding or end token inside the target counts like any other.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from traceforge.config import DataSettings
from traceforge.errors import InputError
from traceforge.samples import lengths
from traceforge.samples.encoding import Encoding, TextEncoder
from traceforge.samples.layout import ChatLayout, Conversation, TurnLayout
from traceforge.samples.refusal import Refusal, Refused, TooLong
from traceforge.samples.template import ChatTemplate, chat_messages
from traceforge.samples.template_traits import TemplateTraits, default_system_prompt, read_traits
from traceforge.samples.tokenizer import tokenizer_fingerprint
from traceforge.samples.tokens import FloatArray, Sample
from traceforge.samples.transcript import action_text, message_block, transcript_messages, turn_text
from traceforge.samples.turns import actions, turn_number
from traceforge.trajectories.record import Message, Trajectory

__all__ = ["RENDERER_VERSION", "Refusal", "TurnRenderer", "default_system_prompt"]

RENDERER_VERSION = 1
"""Raised with every change that gives other tokens or weights for the same input."""

BORDER_MERGE = "border_merge"


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A trajectory after what the length policy does once for all its turns."""

    messages: tuple[Message, ...]
    shortened: frozenset[int]
    conversation: Conversation
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A turn as text and tokens."""

    layout: TurnLayout
    tokens: Encoding
    num_prompt_tokens: int
    cuts: tuple[str, ...]


class TurnRenderer:
    """Renders turns under one tokenizer and one set of data settings.

    It keeps the last trajectory it saw, so turns are rendered fastest in order.
    """

    def __init__(
        self, tokenizer: Any, settings: DataSettings, *, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._template_kwargs = dict(template_kwargs or {})
        self._template = ChatTemplate(tokenizer, self._template_kwargs)
        self._encoder = TextEncoder(tokenizer)
        self._eos = None if tokenizer.eos_token is None else str(tokenizer.eos_token)
        self._last: tuple[Trajectory, _Prepared] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """The sha256 of everything that changes the tokens or weights of a sample, trajectories aside."""
        settings = self._settings
        template = json.dumps(self._tokenizer.chat_template)
        content = {
            "renderer": RENDERER_VERSION,
            "tokenizer": tokenizer_fingerprint(self._tokenizer),
            "template_kwargs": self._template_kwargs,
            "rendering": settings.rendering,
            "target": settings.target,
            "loss_on": settings.loss_on,
            "max_tokens": settings.max_tokens,
            "length_policy": settings.length_policy,
            "observation_limit_tokens": settings.observation_limit_tokens,
            # Some templates write the date of the day into the system message.
            "today": datetime.date.today().isoformat() if "strftime_now" in template else None,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def traits(self) -> TemplateTraits:
        """What the chat template renders and how it ends a turn.

        Raises:
            TemplateError: the tokenizer has no template.
        """
        return read_traits(self._template, self._encoder, eos=self._eos)

    def render(self, trajectory: Trajectory, message_index: int, *, group_id: str) -> Sample | Refusal:
        """Return the sample of the turn at `message_index`, or why there is none.

        Raises:
            TemplateError: the tokenizer has no template.
        """
        try:
            drawn = self._draw(trajectory, message_index)
            weights = self._weights(drawn)
            if not weights.any():
                limit = self._settings.max_tokens
                raise Refused("nothing_trained", f"no trained token is left within data.max_tokens = {limit}")
        except Refused as refused:
            return refused.refusal
        return Sample(
            sample_id=f"{trajectory.trajectory_id}#{turn_number(trajectory, message_index)}",
            group_id=group_id,
            task_id=trajectory.task_id,
            token_ids_S=drawn.tokens.ids,
            weights_S=weights,
            cuts=drawn.cuts,
        )

    def text(self, trajectory: Trajectory, message_index: int) -> tuple[str, str]:
        """Return prompt text and ending text of the turn after the length policy, as the model sees them.

        Raises:
            InputError: the turn is refused; the message says why.
            TemplateError: the tokenizer has no template.
        """
        try:
            drawn = self._draw(trajectory, message_index)
        except Refused as refused:
            turn = f"{trajectory.trajectory_id}#{turn_number(trajectory, message_index)}"
            raise InputError(f"{turn}: refused as {refused.refusal.code}: {refused.refusal.detail}") from refused
        border = drawn.layout.num_prompt_chars
        stop = int(drawn.tokens.stops[-1]) if lengths.CUT_AT_END in drawn.cuts else len(drawn.layout.text)
        return drawn.layout.text[: min(border, stop)], drawn.layout.text[border:stop]

    @cached_property
    def _chat(self) -> ChatLayout:
        return ChatLayout(self._template, self.traits, self._encoder, eos=self._eos)

    def _draw(self, trajectory: Trajectory, message_index: int) -> _Drawn:
        """Return the turn as text and tokens that fit.

        Raises:
            Refused: there is no such sample.
        """
        message = trajectory.messages[message_index]
        assert message.role == "assistant", f"message {message_index} of {trajectory.trajectory_id} is no turn"
        if message_index == 0:
            raise Refused("empty_prompt", "the trajectory begins with this turn: there is no message to answer")
        if self._settings.target == "action" and not actions(message):
            raise Refused("no_action", "the turn has neither a tool call nor exactly one fenced bash block")
        prepared = self._prepare(trajectory)
        try:
            drawn = self._drawn(trajectory, prepared, message_index)
        except TooLong as too_long:
            if self._settings.length_policy != "drop_oldest":
                raise
            drawn = self._without_oldest(trajectory, message_index, too_long)
        if any(index < message_index for index in prepared.shortened):
            drawn = replace(drawn, cuts=(lengths.OBSERVATIONS_SHORTENED, *drawn.cuts))
        return drawn

    def _without_oldest(self, trajectory: Trajectory, message_index: int, too_long: TooLong) -> _Drawn:
        """Return the turn with as few of the oldest observations dropped as make it fit."""
        droppable = lengths.droppable_observations(trajectory.messages, message_index)

        def dropping(count: int) -> _Drawn:
            messages = lengths.drop_observations(trajectory.messages, droppable[:count])
            return self._drawn(trajectory, self._converted(trajectory, messages, frozenset()), message_index)

        def fits(count: int) -> bool:
            try:
                dropping(count)
            except TooLong:
                return False
            return True

        count = lengths.fewest(len(droppable), fits)
        if count is None:
            found = f"{len(droppable)} droppable observations are not enough"
            raise TooLong(f"{too_long.refusal.detail}; {found}") from too_long
        drawn = dropping(count)
        return replace(drawn, cuts=(lengths.OBSERVATIONS_DROPPED, *drawn.cuts))

    def _prepare(self, trajectory: Trajectory) -> _Prepared:
        if self._last is None or self._last[0] is not trajectory:
            messages, shortened = trajectory.messages, frozenset[int]()
            if self._settings.length_policy == "shorten_observations":
                limit = self._settings.observation_limit_tokens
                messages, shortened = lengths.shorten_observations(messages, limit, self._encoder)
            self._last = (trajectory, self._converted(trajectory, messages, shortened))
        return self._last[1]

    def _converted(self, trajectory: Trajectory, messages: tuple[Message, ...], shortened: frozenset[int]) -> _Prepared:
        """Return the messages in the shape of the chosen rendering."""
        if self._settings.rendering == "transcript":
            blocks = tuple(message_block(index, message) for index, message in enumerate(messages))
            return _Prepared(messages, shortened, Conversation((), ()), blocks)
        conversation = Conversation(
            messages=chat_messages(messages, self.traits.arguments),
            trained=[message.trained for message in messages],
            tools=trajectory.tools,
            trajectory_id=trajectory.trajectory_id,
        )
        return _Prepared(messages, shortened, conversation, ())

    def _drawn(self, trajectory: Trajectory, prepared: _Prepared, message_index: int) -> _Drawn:
        settings, context_trained = self._settings, self._settings.loss_on == "all"
        if settings.rendering == "transcript":
            layout = self._transcript(trajectory, prepared, message_index)
        else:
            whole = prepared.conversation
            until_turn = Conversation(
                whole.messages[: message_index + 1],
                whole.trained[: message_index + 1],
                whole.tools,
                whole.trajectory_id,
            )
            layout = self._chat.lay_out(until_turn, target=settings.target, context_trained=context_trained)
        return self._within_limit(layout)

    def _within_limit(self, layout: TurnLayout) -> _Drawn:
        """Return the layout with its tokens, cut at the end if that is the policy.

        Raises:
            TooLong: there are more than `data.max_tokens`, under another policy.
        """
        limit, policy = self._settings.max_tokens, self._settings.length_policy
        enough = lengths.telling_prefix(layout.text, limit, self._encoder)
        if enough < len(layout.text) and policy != "truncate_end":
            raise TooLong(f"more than {2 * limit} tokens under {policy}, data.max_tokens is {limit}")
        tokens, num_prompt_tokens, cuts = self._tokenise(layout, enough)
        if tokens.ids.size > limit and policy != "truncate_end":
            raise TooLong(f"{tokens.ids.size} tokens under {policy}, data.max_tokens is {limit}")
        if tokens.ids.size > limit:
            tokens = Encoding(*(array[:limit] for array in tokens))
            cuts = (*cuts, lengths.CUT_AT_END)
        return _Drawn(layout, tokens, num_prompt_tokens, (*layout.cuts, *cuts))

    def _transcript(self, trajectory: Trajectory, prepared: _Prepared, message_index: int) -> TurnLayout:
        message = prepared.messages[message_index]
        answer = turn_text(message) if self._settings.target == "turn" else action_text(message)
        assert answer is not None, "a turn without an action is refused before it is laid out"
        messages = transcript_messages(trajectory.task_id, prepared.blocks[:message_index], answer)
        layout = self._chat.lay_out(
            Conversation(chat_messages(messages), [None] * len(messages), (), trajectory.trajectory_id),
            target="turn",
            context_trained=self._settings.loss_on == "all",
        )
        if answer.strip() not in layout.ending:
            raise Refused("answer_not_rendered", "the chat template changes the text of the answer")
        return layout

    def _tokenise(self, layout: TurnLayout, num_chars: int) -> tuple[Encoding, int, tuple[str, ...]]:
        """Return the tokens of the first `num_chars`, how many of them are the prompt's, and reason codes.

        Raises:
            Refused: no way to tokenise the ending behind the prompt's own tokens gives the text back.
        """
        whole, prompt = self._encoder.encode(layout.text[:num_chars]), self._encoder.encode(layout.prompt[:num_chars])
        num_prompt_tokens = int(prompt.ids.size)
        if np.array_equal(whole.ids[:num_prompt_tokens], prompt.ids):
            return whole, num_prompt_tokens, ()
        text = self._encoder.decode(whole.ids)
        for ending in self._encoder.encode_ending(layout.text[layout.num_prompt_chars : num_chars]):
            shift = layout.num_prompt_chars
            apart = Encoding(
                np.concatenate([prompt.ids, ending.ids]),
                np.concatenate([prompt.starts, ending.starts + shift]),
                np.concatenate([prompt.stops, ending.stops + shift]),
            )
            if self._encoder.decode(apart.ids) == text:
                return apart, num_prompt_tokens, (BORDER_MERGE,)
        border = layout.text[max(0, layout.num_prompt_chars - 20) : layout.num_prompt_chars + 20]
        raise Refused("border_not_tokenisable", f"no tokens of the ending continue the prompt's own at {border!r}")

    def _weights(self, drawn: _Drawn) -> FloatArray:
        tokens, layout = drawn.tokens, drawn.layout
        in_ending = np.arange(tokens.ids.size) >= drawn.num_prompt_tokens
        if self._settings.loss_on == "all":
            weights = np.ones(tokens.ids.size)
            for start, stop in layout.untrained:
                # The first range is the generation prompt's; no range reaches into the ending.
                weights[~in_ending & (tokens.starts < stop) & (tokens.stops > start)] = 0.0
        else:
            start, stop = layout.target
            begins_before_end = in_ending & (tokens.starts < stop)
            weights = (begins_before_end & ((tokens.stops > start) | (tokens.starts >= start))).astype(np.float64)
        weights[:1] = 0.0  # no hidden state precedes the first token
        return weights
