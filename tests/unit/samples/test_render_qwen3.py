"""The real Qwen3 tokenizer and template, on real runs: reasoning that is dropped from history, tools, masks."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
from tests.rendering_cases import (
    TEXT_RUN,
    TOOL_RUN,
    assistant,
    load_run,
    refused,
    rendered,
    renderer,
    text_of,
    trained_parts,
    trajectory,
    user,
)

from traceforge.samples.render import Refusal, default_system_prompt
from traceforge.samples.tokens import Sample
from traceforge.trajectories.record import Trajectory

THINKING = trajectory(
    user("first"), assistant("one", reasoning="thought one"), user("second"), assistant("two", reasoning="thought two")
)


def every_sample(tokenizer: Any, run: Trajectory, **settings: Any) -> list[Sample]:
    rendering = renderer(tokenizer, **settings)
    outcomes = [rendering.render(run, index, group_id="g") for index in run.turns()]
    assert not [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    return [outcome for outcome in outcomes if isinstance(outcome, Sample)]


def test_old_reasoning_is_dropped_so_a_turn_is_no_prefix_of_the_next(qwen3_tokenizer: Any) -> None:
    # A12: each turn is rendered for itself, and each learns its own reasoning.
    first, second = every_sample(qwen3_tokenizer, THINKING)
    assert text_of(qwen3_tokenizer, first) == (
        "<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\n<think>\nthought one\n</think>\n\none<|im_end|>\n"
    )
    assert text_of(qwen3_tokenizer, second) == (
        "<|im_start|>user\nfirst<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n<think>\nthought two\n</think>\n\ntwo<|im_end|>\n"
    )
    assert second.token_ids_S[: first.num_tokens].tolist() != first.token_ids_S.tolist()
    assert trained_parts(qwen3_tokenizer, first) == ["<think>\nthought one\n</think>\n\none<|im_end|>"]
    assert trained_parts(qwen3_tokenizer, second) == ["<think>\nthought two\n</think>\n\ntwo<|im_end|>"]


def test_a_run_of_tool_calls_keeps_its_reasoning_and_each_turn_continues_the_last(qwen3_tokenizer: Any) -> None:
    # Only tool results follow the task, so the template keeps every thought: here the samples do share their history.
    samples = every_sample(qwen3_tokenizer, load_run(TOOL_RUN))
    assert len(samples) == 5
    for shorter, longer in itertools.pairwise(samples):
        assert longer.token_ids_S[: shorter.num_tokens].tolist() == shorter.token_ids_S.tolist()


def test_the_trained_tokens_of_a_real_tool_run_read_exactly_as_its_turns(qwen3_tokenizer: Any) -> None:
    raw = [message for message in json.loads(TOOL_RUN.read_text())["messages"] if message["role"] == "assistant"]
    for sample, message in zip(every_sample(qwen3_tokenizer, load_run(TOOL_RUN)), raw, strict=True):
        calls = []
        for call in message["tool_calls"]:
            arguments = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)
            calls.append(f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>')
        thought = message["reasoning_content"].strip("\n")
        assert trained_parts(qwen3_tokenizer, sample) == [
            f"<think>\n{thought}\n</think>\n\n" + "\n".join(calls) + "<|im_end|>"
        ]


def test_the_action_target_of_a_real_tool_run_is_its_calls(qwen3_tokenizer: Any) -> None:
    for sample in every_sample(qwen3_tokenizer, load_run(TOOL_RUN), target="action"):
        (part,) = trained_parts(qwen3_tokenizer, sample)
        assert part.startswith('<tool_call>\n{"name": "bash", "arguments": {"command": ')
        assert part.endswith('"}}\n</tool_call><|im_end|>')


def test_the_trained_tokens_of_a_real_text_run_read_exactly_as_its_turns(qwen3_tokenizer: Any) -> None:
    run = load_run(TEXT_RUN)
    samples = every_sample(qwen3_tokenizer, run)
    assert len(samples) == 20
    for index, sample in zip(run.turns(), samples, strict=True):
        content = run.messages[index].content.lstrip("\n")
        assert trained_parts(qwen3_tokenizer, sample) == [f"<think>\n\n</think>\n\n{content}<|im_end|>"]
    for sample in every_sample(qwen3_tokenizer, run, template_kwargs={"enable_thinking": False}):
        (part,) = trained_parts(qwen3_tokenizer, sample)
        assert "<think>" not in part  # A14: this generation prompt writes the pair itself


def test_reasoning_under_a_generation_prompt_that_closes_it_is_refused(qwen3_tokenizer: Any) -> None:
    outcome = refused(qwen3_tokenizer, THINKING, template_kwargs={"enable_thinking": False})
    assert outcome.code == "ending_does_not_follow_generation_prompt"
    assert "enable_thinking" in outcome.detail


def test_remembered_parts_give_the_ids_of_one_joint_tokenisation(qwen3_tokenizer: Any) -> None:
    for path, kwargs in ((TOOL_RUN, {}), (TEXT_RUN, {"enable_thinking": False})):
        run = load_run(path)
        rendering = renderer(qwen3_tokenizer, template_kwargs=kwargs)
        assert rendering._encoder.splits_at_special_tokens
        for index in run.turns():
            sample = rendering.render(run, index, group_id="g")
            assert isinstance(sample, Sample)
            joint = qwen3_tokenizer("".join(rendering.text(run, index)), add_special_tokens=False)["input_ids"]
            assert sample.token_ids_S.tolist() == joint


def test_the_prompt_of_a_sample_is_what_inference_would_send(qwen3_tokenizer: Any) -> None:
    run = load_run(TEXT_RUN)
    messages = [{"role": message.role, "content": message.content} for message in run.messages]
    for index in run.turns()[::5]:
        sample = rendered(qwen3_tokenizer, run, index)
        sent = qwen3_tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, return_dict=False)
        first_trained = int(np.flatnonzero(sample.weights_S)[0])
        assert sample.token_ids_S[:first_trained].tolist() == list(sent)


def test_tool_schemas_of_the_trajectory_reach_the_prompt(qwen3_tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": {"type": "object"}}}
    sample = rendered(qwen3_tokenizer, trajectory(user("q"), assistant("a"), tools=(tool,)))
    assert json.dumps(tool) in text_of(qwen3_tokenizer, sample)


def test_qwen3_adds_no_system_prompt_of_its_own(qwen3_tokenizer: Any) -> None:
    # A25
    assert default_system_prompt(qwen3_tokenizer) is None
