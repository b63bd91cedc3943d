"""The transcript rendering, against a text built here in another way from the raw log of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures_tokenizers import CHATML, tiny_tokenizer
from tests.rendering_cases import (
    TEXT_RUN,
    TOOL_RUN,
    assistant,
    call,
    load_run,
    refused,
    rendered,
    renderer,
    result,
    system,
    text_of,
    trained_parts,
    trajectory,
    user,
)

HANDMADE = trajectory(
    system("Be brief."),
    user("Fix it."),
    assistant("I look.", call("read", '{"path":"a"}', "c1"), call("list", "{not json", "c2"), reasoning="Where?"),
    result("one", "c1"),
    result("two", "c2"),
    assistant("", call("submit", "{}")),
)


def expected_transcript(path: Path, index: int) -> tuple[str, str]:
    """The user message and the answer of the turn at `index`, from the raw log alone."""
    messages = json.loads(path.read_text(encoding="utf-8"))["messages"]

    def said(message: dict[str, Any]) -> str:
        text = f"Reasoning:\n{message['reasoning_content']}\n\n" if message.get("reasoning_content") else ""
        text += f"{message['content']}\n\n" if message.get("content") else ""
        for tool_call in message.get("tool_calls") or []:
            function = tool_call["function"]
            text += f"Action:\n{function['name']}({function['arguments']})\n\n"
        return text.removesuffix("\n\n")

    history = ""
    for number, message in enumerate(messages[:index]):
        history += f"[{message['role'].upper()} #{number}]\n{said(message)}" + ("\n\n" if number < index - 1 else "")
    return f"Case: {path.stem}\n{history}\nPredict next action.", said(messages[index])


@pytest.mark.parametrize("path", [TOOL_RUN, TEXT_RUN])
def test_a_transcript_of_a_real_run_reads_exactly_as_defined(path: Path, qwen3_tokenizer: Any) -> None:
    run = load_run(path)
    for index in run.turns():
        question, answer = expected_transcript(path, index)
        sample = rendered(
            qwen3_tokenizer, run, index, rendering="transcript", template_kwargs={"enable_thinking": False}
        )
        assert text_of(qwen3_tokenizer, sample) == (
            "<|im_start|>system\nYou are learning from a debug trajectory.<|im_end|>\n"
            f"<|im_start|>user\n{question}<|im_end|>\n"
            f"<|im_start|>assistant\n<think>\n\n</think>\n\n{answer}<|im_end|>\n"
        )
        assert trained_parts(qwen3_tokenizer, sample) == [f"{answer}<|im_end|>"]


def test_a_handmade_transcript_is_the_text_written_here() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    prompt, ending = renderer(tokenizer, rendering="transcript").text(HANDMADE, 5)
    assert prompt == (
        "<|im_start|>system\nYou are learning from a debug trajectory.<|im_end|>\n<|im_start|>user\n"
        "Case: task\n"
        "[SYSTEM #0]\nBe brief.\n\n"
        "[USER #1]\nFix it.\n\n"
        '[ASSISTANT #2]\nReasoning:\nWhere?\n\nI look.\n\nAction:\nread({"path":"a"})\n\nAction:\nlist({not json)\n\n'
        "[TOOL #3]\none\n\n"
        "[TOOL #4]\ntwo\n"
        "Predict next action.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ending == "Action:\nsubmit({})<|im_end|>\n"


def test_the_answer_is_only_the_actions_under_the_action_target() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    sample = rendered(tokenizer, HANDMADE, 2, rendering="transcript", target="action")
    assert trained_parts(tokenizer, sample) == ['Action:\nread({"path":"a"})\n\nAction:\nlist({not json)<|im_end|>']
    assert "I look." not in text_of(tokenizer, sample)


def test_the_command_of_a_text_scaffold_is_its_action() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    run = trajectory(user("q"), assistant("I list.\n\n```bash\nls\n```\n"))
    sample = rendered(tokenizer, run, rendering="transcript", target="action")
    assert trained_parts(tokenizer, sample) == ["```bash\nls\n```<|im_end|>"]


def test_a_transcript_needs_no_template_support_for_tool_calls() -> None:
    assert refused(tiny_tokenizer(CHATML), HANDMADE, 5).code == "tool_calls_not_rendered"
    assert rendered(tiny_tokenizer(CHATML), HANDMADE, 5, rendering="transcript").cuts == ()


def test_shortened_observations_are_shortened_in_the_transcript_too() -> None:
    run = trajectory(user("q"), assistant("a"), user("word " * 500, observation=True), assistant("b"))
    tokenizer = tiny_tokenizer(CHATML)
    sample = rendered(
        tokenizer, run, rendering="transcript", length_policy="shorten_observations", observation_limit_tokens=10
    )
    assert sample.cuts == ("observations_shortened",)
    assert "characters omitted" in text_of(tokenizer, sample)


def test_a_template_that_changes_the_answer_is_refused(qwen3_tokenizer: Any) -> None:
    # Qwen3's template takes text before a `</think>` for reasoning, and this answer quotes one.
    run = trajectory(user("q"), assistant("The tag is </think> here", reasoning="why"))
    outcome = refused(qwen3_tokenizer, run, rendering="transcript")
    assert outcome.code == "answer_not_rendered"
