"""Data sets under the real Qwen3 tokenizer and template; the oracle is the template itself, called on TRL rows."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path

import pytest
from tests.dataset_stubs import assistant, settings_for, trajectory, user, write_trajectories

from traceforge.samples.build import build_sft
from traceforge.samples.dataset import load_samples
from traceforge.samples.inspection import inspection_settings, run_inspect
from traceforge.samples.row_samples import instruction_prompt
from traceforge.samples.tokenizer import load_tokenizer
from traceforge.trajectories.record import Message, ToolCall

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    packed = DATA / "tokenizers" / "qwen3"
    (folder / "tokenizer.json").write_bytes(lzma.decompress((packed / "tokenizer.json.xz").read_bytes()))
    shutil.copy(packed / "tokenizer_config.json", folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model):
    return load_tokenizer(str(model))


@pytest.fixture
def folder(tmp_path):
    call = ToolCall("bash", '{"command": "ls"}', id="c1")
    run = trajectory(
        "run-1",
        Message(role="system", content="You fix code."),
        user("Fix the test."),
        assistant("I look first.", reasoning="Where is it?", tool_calls=(call,)),
        Message(role="tool", content="a.py\n", tool_call_id="c1", observation=True),
        assistant("Done."),
        task="repo-7",
    )
    build_sft(write_trajectories(tmp_path / "in", run), tmp_path / "out", as_trl=True)
    return tmp_path / "out"


def test_a_chat_sample_is_what_the_template_says_of_its_trl_row(folder, tokenizer) -> None:
    samples = load_samples(settings_for(folder), tokenizer).train[0].samples
    rows = [json.loads(line) for line in (folder / "trl.jsonl").read_text().splitlines()]
    assert len(samples) == len(rows) == 2
    for one, row in zip(samples, rows, strict=True):
        prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)
        assert tokenizer.decode(one.token_ids_S) == whole
        trained = tokenizer.decode(one.token_ids_S[one.weights_S > 0])
        assert trained == whole.removesuffix("\n").removeprefix(prompt)
        assert trained.endswith("<|im_end|>")


def test_a_transcript_sample_reads_exactly_as_the_contract_defines(folder, model, capsys) -> None:
    config = inspection_settings(str(folder), model=str(model), overrides=["data.rendering=transcript"])
    run_inspect(str(folder), config, sample="run-1#1", raw=True)
    assert capsys.readouterr().out == (
        "<|im_start|>system\nYou are learning from a debug trajectory.<|im_end|>\n"
        "<|im_start|>user\n"
        "Case: repo-7\n"
        "[SYSTEM #0]\nYou fix code.\n\n"
        "[USER #1]\nFix the test.\n\n"
        '[ASSISTANT #2]\nReasoning:\nWhere is it?\n\nI look first.\n\nAction:\nbash({"command": "ls"})\n\n'
        "[TOOL #3]\na.py\n\n"
        "Predict next action.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nDone.<|im_end|>\n"
    )


def test_a_conversational_row_is_rendered_like_the_turn_it_came_from(folder, tokenizer, tmp_path) -> None:
    turns = load_samples(settings_for(folder), tokenizer).train[0].samples
    rows = load_samples(settings_for(folder / "trl.jsonl"), tokenizer).train[0].samples
    assert [one.sample_id for one in rows] == ["trl#0", "trl#1"]
    assert [one.token_ids_S.tolist() for one in rows] == [one.token_ids_S.tolist() for one in turns]
    assert [one.weights_S.tolist() for one in rows] == [one.weights_S.tolist() for one in turns]


def test_prompt_and_response_of_an_instruction_row_are_tokenised_apart(tokenizer) -> None:
    samples = load_samples(settings_for(DATA / "rows" / "instructions.jsonl"), tokenizer).train[0].samples
    expected = [
        (instruction_prompt("Say hello."), "Hello."),
        (instruction_prompt("Add the numbers.", "2, 3"), "5"),
        (instruction_prompt("Name a shell."), "bash"),
        (instruction_prompt("Translate."), "größe 🙂"),
    ]
    for one, (prompt, response) in zip(samples, expected, strict=True):
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        response_ids = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        assert one.token_ids_S.tolist() == prompt_ids + response_ids
        assert one.weights_S.tolist() == [0] * len(prompt_ids) + [1] * len(response_ids)


def test_the_bundled_instruction_rows_all_fit_256_tokens(tokenizer) -> None:
    rows = Path(__file__).parents[3] / "examples" / "data" / "instructions.jsonl"
    sets = load_samples(
        settings_for(rows, max_tokens=256, length_policy="truncate_end", train_rows=24, evaluation_rows=8), tokenizer
    )
    assert (len(sets.train[0].samples), len(sets.evaluation)) == (24, 8)
    everything = load_samples(settings_for(rows, max_tokens=256), tokenizer).statistics
    assert everything.train.samples == 64
    assert everything.refusals == {}
