"""Pairs under the real Qwen3 tokenizer and template: tools, reasoning that is dropped from history, real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.rendering_cases import TOOL_RUN, load_run, rendered, text_of, trained_parts

from traceforge.config import DataSettings
from traceforge.samples.branches import Pair
from traceforge.samples.pair_build import build_pairs
from traceforge.samples.pair_inspection import continued
from traceforge.samples.pair_loading import load_pairs
from traceforge.trajectories.record import encode

DATA = Path(__file__).parents[2] / "data" / "pairs"
NO_THOUGHT = "<think>\n\n</think>\n\n"


def load(folder: Path, tokenizer: Any, **given: Any) -> tuple[Pair, ...]:
    fields = {"train": str(folder), "max_tokens": 100_000, "length_policy": "refuse", **given}
    return load_pairs(DataSettings.model_validate(fields), tokenizer).train[0].pairs


def test_tools_and_calls_are_in_both_sides_and_only_replies_are_trained(tmp_path: Path, qwen3_tokenizer: Any) -> None:
    build_pairs(DATA / "trl.jsonl", tmp_path / "pairs")
    pair = load(tmp_path / "pairs", qwen3_tokenizer)[1]
    border = int(np.flatnonzero(pair.chosen[0].weights_S)[0])
    prompts = [text_of(qwen3_tokenizer, sample).partition("rain\n</tool_response>")[0] for sample in pair.samples]
    assert len(set(prompts)) == 1
    assert '"name": "weather"' in prompts[0]
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompts[0]
    assert pair.chosen[0].token_ids_S[:border].tolist() == pair.rejected[0].token_ids_S[:border].tolist()
    # The tool turn of the ending stays untrained: its result is context of the turn behind it.
    assert [trained_parts(qwen3_tokenizer, sample) for sample in pair.rejected] == [
        [f'{NO_THOUGHT}<tool_call>\n{{"name": "weather", "arguments": {{"city": "Lyon"}}}}\n</tool_call><|im_end|>'],
        [f"{NO_THOUGHT}Sunny.<|im_end|>"],
    ]
    assert "<tool_response>\nsun\n</tool_response>" in text_of(qwen3_tokenizer, pair.rejected[1])


def test_an_ending_whose_reasoning_is_dropped_has_a_sequence_a_turn_each_with_its_own(
    tmp_path: Path, qwen3_tokenizer: Any
) -> None:
    def answer(text: str, reasoning: str) -> dict[str, str]:
        return {"role": "assistant", "content": text, "reasoning_content": reasoning}

    again = {"role": "user", "content": "second"}
    row = {
        "prompt": "first",
        "chosen": [answer("one", "thought one"), again, answer("two", "thought two")],
        "rejected": [answer("one", "thought one"), again, answer("three", "thought three")],
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    build_pairs(tmp_path / "rows.jsonl", tmp_path / "pairs")
    (pair,) = load(tmp_path / "pairs", qwen3_tokenizer)
    assert [trained_parts(qwen3_tokenizer, sample) for sample in pair.chosen] == [
        ["<think>\nthought one\n</think>\n\none<|im_end|>"],
        ["<think>\nthought two\n</think>\n\ntwo<|im_end|>"],
    ]
    assert "thought one" not in text_of(qwen3_tokenizer, pair.chosen[1])
    # The first turn is the same on both sides, and is trained on both: the prompt is the given one.
    assert pair.chosen[0].token_ids_S.tolist() == pair.rejected[0].token_ids_S.tolist()
    assert pair.rejected[0].num_trained_tokens == pair.chosen[0].num_trained_tokens > 0
    assert len(continued(pair.chosen)) == 2  # no sequence continues the other


def test_two_real_turns_are_the_samples_of_fine_tuning(tmp_path: Path, qwen3_tokenizer: Any) -> None:
    run = load_run(TOOL_RUN)
    name = run.trajectory_id
    (tmp_path / "trajectories.jsonl").write_bytes(encode(run) + b"\n")
    reply = {"role": "assistant", "content": "I give up."}
    (tmp_path / "given.jsonl").write_text(json.dumps({"chosen": f"{name}#3", "rejected": reply}) + "\n")
    build_pairs(tmp_path, tmp_path / "pairs", explicit=[str(tmp_path / "given.jsonl")])
    (pair,) = load(tmp_path / "pairs", qwen3_tokenizer)
    expected = rendered(qwen3_tokenizer, run, run.turns()[3])
    assert pair.chosen[0].sample_id == f"{name}#3"
    assert pair.chosen[0].token_ids_S.tolist() == expected.token_ids_S.tolist()
    assert pair.chosen[0].weights_S.tolist() == expected.weights_S.tolist()
    border = int(np.flatnonzero(expected.weights_S)[0])
    assert pair.rejected[0].token_ids_S[:border].tolist() == expected.token_ids_S[:border].tolist()
    assert trained_parts(qwen3_tokenizer, pair.rejected[0]) == [f"{NO_THOUGHT}I give up.<|im_end|>"]
