"""Rows of a row file to samples: prompts, tokens, masks, and the stable selection of the textbook experiment.

Strings  Prompt and response are tokenised apart and without special tokens, the end-of-sequence id is appended to the
         response and trained whatever the padding token is. No token is found by searching for marker text.
Lengths  String rows have no observations: only `length_policy = "truncate_end"` cuts them; under every other policy a
         row above `max_tokens` is refused as `too_long`, as a turn that cannot be shortened is.
Messages A conversational row is rendered by the model's own template, as a trajectory whose last turn is trained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from traceforge.config import DataSettings
from traceforge.errors import ConfigError, InputError, ModelError
from traceforge.samples.lengths import CUT_AT_END
from traceforge.samples.refusal import Refusal
from traceforge.samples.render import TurnRenderer
from traceforge.samples.row_files import RowFile
from traceforge.samples.split import stable_hash
from traceforge.samples.statistics import RefusalCount, RefusalTally
from traceforge.samples.tokens import Sample
from traceforge.trajectories.record import Message, ToolCall, Trajectory


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The samples of a row file: training rows, held-out rows, and what was passed over on the way."""

    train: tuple[Sample, ...]
    evaluation: tuple[Sample, ...]
    examined: int
    refusals: dict[str, RefusalCount]


def instruction_prompt(instruction: str, context: str = "") -> str:
    """Return the prompt of an instruction row; the `### Input:` part is left out when `context` is empty."""
    middle = f"### Input:\n{context}\n" if context else ""
    return f"### Instruction:\n{instruction}\n{middle}### Response:\n"


def select_rows(
    source: RowFile,
    tokenizer: Any,
    renderer: TurnRenderer | None,
    settings: DataSettings,
    *,
    train_rows: int | None = None,
    evaluation_rows: int | None = None,
) -> RowSelection:
    """Return the samples of a row file, with the refused rows counted by reason.

    `renderer` is given for conversational rows and only for them: strings need no template.

    Without numbers: every row, in file order. With `train_rows`: of the rows in the order of `stable_hash`, the first
    2 * (train_rows + evaluation_rows) are candidates; the first trainable ones are kept, training rows first. With
    `evaluation_rows` alone, all rows take part and the last trainable ones in that order are held out.

    Raises:
        InputError: fewer trainable rows than wanted.
        ConfigError: a setting that these rows cannot honour.
        ModelError: the tokenizer has no end-of-sequence token.
    """
    to_sample = _RowTokenizer(source, tokenizer, renderer, settings)
    order = list(range(len(source.rows)))
    if train_rows is not None or evaluation_rows is not None:
        order.sort(key=lambda index: stable_hash(source.row_id(index), seed=settings.seed))
    held_out = evaluation_rows or 0
    wanted = None if train_rows is None else train_rows + held_out
    candidates = order if wanted is None else order[: 2 * wanted]
    tally = RefusalTally()
    kept: list[Sample] = []
    examined = 0
    for index in candidates:
        if wanted is not None and len(kept) == wanted:
            break
        examined += 1
        made = to_sample(index)
        if isinstance(made, Refusal):
            tally.add(made.code, source.row_id(index), made.detail)
        else:
            kept.append(made)
    refusals = tally.counts()
    if (wanted is not None and len(kept) < wanted) or (held_out and len(kept) <= held_out):
        raise _too_few(source, len(kept), examined, refusals, train_rows, evaluation_rows)
    cut = len(kept) - held_out
    return RowSelection(tuple(kept[:cut]), tuple(kept[cut:]), examined, refusals)


class _RowTokenizer:
    """Makes the sample of one row."""

    def __init__(self, source: RowFile, tokenizer: Any, renderer: TurnRenderer | None, settings: DataSettings) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._settings = settings
        assert (renderer is not None) == (source.form == "conversation")
        if renderer is not None:
            return
        for name, value in (("rendering", settings.rendering), ("target", settings.target)):
            if value in {"transcript", "action"}:
                raise ConfigError(
                    f"data.{name} = {value!r} needs turns of trajectories, and {source.origin} holds "
                    f"{source.form.replace('_', '-')} rows, which are used as they stand",
                    hint=f"leave data.{name} out",
                )
        if tokenizer.eos_token_id is None:
            raise ModelError(
                "the tokenizer has no end-of-sequence token, and every row ends with it",
                hint="set eos_token in the tokenizer_config.json of the model",
            )

    def __call__(self, index: int) -> Sample | Refusal:
        row, row_id = self._source.rows[index], self._source.row_id(index)
        if self._renderer is not None:
            trajectory = conversation(row, row_id, self._source.place(index))
            made = self._renderer.render(trajectory, len(trajectory.messages) - 1, group_id=row_id)
            return made if isinstance(made, Refusal) else replace(made, sample_id=row_id, task_id=row_id)
        if self._source.form == "instruction":
            prompt = instruction_prompt(row["instruction"], row.get("input") or "")
            return self._tokenise(prompt, row["output"], row_id)
        return self._tokenise(row["prompt"], row["completion"], row_id)

    def _tokenise(self, prompt: str, response: str, row_id: str) -> Sample | Refusal:
        limit = self._settings.max_tokens
        prompt_ids = self._encode(prompt)
        token_ids = [*prompt_ids, *self._encode(response), int(self._tokenizer.eos_token_id)]
        cuts: tuple[str, ...] = ()
        if len(token_ids) > limit:
            if self._settings.length_policy != "truncate_end":
                detail = f"{len(token_ids)} tokens, data.max_tokens is {limit}, and the row has nothing to shorten"
                return Refusal("too_long", detail)
            token_ids, cuts = token_ids[:limit], (CUT_AT_END,)
        first_trained = 0 if self._settings.loss_on == "all" else len(prompt_ids)
        weights = np.zeros(len(token_ids), dtype=np.float64)
        weights[max(1, first_trained) :] = 1.0
        if not weights.any():
            return Refusal(
                "nothing_trained", f"the prompt alone has {len(prompt_ids)} tokens, data.max_tokens is {limit}"
            )
        return Sample(
            sample_id=row_id,
            group_id=row_id,
            task_id=row_id,
            token_ids_S=np.array(token_ids, dtype=np.int64),
            weights_S=weights,
            cuts=cuts,
        )

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def conversation(row: dict[str, Any], row_id: str, place: str) -> Trajectory:
    """Return a conversational row as a trajectory whose last message is the trained turn.

    Raises:
        InputError: a message is malformed, or the completion is not exactly one assistant message.
    """
    completion = row["completion"]
    if len(completion) != 1 or _field(completion[0], "role", place) != "assistant":
        raise InputError(
            f"{place}: completion must be one assistant message, it has {len(completion)} messages",
            hint="ingest whole conversations with `traceforge ingest`; every assistant turn becomes a sample",
        )
    messages = tuple(_message(message, place) for message in [*row["prompt"], *completion])
    tools = row.get("tools") or []
    return Trajectory(
        trajectory_id=row_id,
        task_id=row_id,
        source_format="prompt_completion",
        source_file=place,
        messages=messages,
        tools=tuple(json.loads(tools) if isinstance(tools, str) else tools),
    )


def _message(message: Any, place: str) -> Message:
    role = _field(message, "role", place)
    content = message.get("content")
    if role not in {"system", "user", "assistant", "tool"} or not isinstance(content, str | None):
        raise InputError(
            f"{place}: a message has role {role!r} and content of type {type(content).__name__}",
            hint="roles are system, user, assistant and tool; content is text. `traceforge ingest` reads more forms",
        )
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    calls = tuple(_tool_call(call, place) for call in message.get("tool_calls") or ())
    return Message(
        role=role,
        content=content or "",
        reasoning=reasoning or None,
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id"),
        observation=role == "tool",
    )


def _tool_call(call: Any, place: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{place}: a tool call has no function with a name")
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=function["name"], arguments=text, id=call.get("id"))


def _field(message: Any, name: str, place: str) -> Any:
    if not isinstance(message, dict) or name not in message:
        raise InputError(f"{place}: a message has no field {name!r}")
    return message[name]


def _too_few(
    source: RowFile,
    kept: int,
    examined: int,
    refusals: dict[str, RefusalCount],
    train_rows: int | None,
    evaluation_rows: int | None,
) -> InputError:
    named = [
        f"data.{name} = {number}"
        for name, number in (("train_rows", train_rows), ("evaluation_rows", evaluation_rows))
        if number is not None
    ]
    passed_over = "".join(f", {code} {refused.count}" for code, refused in refusals.items())
    return InputError(
        f"{source.origin}: {' and '.join(named) or 'all rows'} asked for, but only {kept} of the {examined} rows "
        f"examined ({len(source.rows)} in the file) can be trained{passed_over}",
        hint="ask for fewer rows, or raise data.max_tokens" if refusals else "ask for fewer rows",
    )
