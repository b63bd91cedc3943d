"""Row files: prompts pinned by hand, masks by position, the stable selection, and errors that name the line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dataset_stubs import ByteRenderer, ByteTokenizer, settings_for

from traceforge.errors import ConfigError, HubError, InputError, ModelError
from traceforge.samples import hub_rows
from traceforge.samples.row_files import checked_rows, read_row_file
from traceforge.samples.row_samples import conversation, instruction_prompt, select_rows

ROWS = Path(__file__).parents[2] / "data" / "rows"

SELECTED = ["rows#14", "rows#3", "rows#0", "rows#7", "rows#6"]


class WordTokenizer:
    """The words of a fixed table; padding is the end-of-sequence token."""

    eos_token_id = 2
    pad_token_id = 2
    table: ClassVar = {"<s>": 1, "who": 11, "are": 12, "a": 21, "robot": 22}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [self.table[word] for word in text.split()]


def rows_of(*rows, name="rows"):
    return checked_rows(name, f"{name}.jsonl", list(rows), content_hash="0")


def chosen(source, tokenizer=None, *, train_rows=None, evaluation_rows=None, **fields):
    tokenizer = tokenizer or ByteTokenizer()
    settings = settings_for("rows.jsonl", **fields)
    renderer = ByteRenderer(tokenizer, settings) if source.form == "conversation" else None
    return select_rows(source, tokenizer, renderer, settings, train_rows=train_rows, evaluation_rows=evaluation_rows)


def test_the_instruction_prompt_is_what_the_contract_says() -> None:
    assert instruction_prompt("Say hello.") == "### Instruction:\nSay hello.\n### Response:\n"
    assert (
        instruction_prompt("Add the numbers.", "2, 3")
        == "### Instruction:\nAdd the numbers.\n### Input:\n2, 3\n### Response:\n"
    )


def test_the_text_of_an_instruction_sample_is_prompt_response_and_end() -> None:
    samples = chosen(read_row_file(ROWS / "instructions.jsonl")).train
    texts = [ByteTokenizer().decode(sample.token_ids_S) for sample in samples]
    assert texts == [
        "### Instruction:\nSay hello.\n### Response:\nHello.</s>",
        "### Instruction:\nAdd the numbers.\n### Input:\n2, 3\n### Response:\n5</s>",
        "### Instruction:\nName a shell.\n### Response:\nbash</s>",
        "### Instruction:\nTranslate.\n### Response:\ngröße 🙂</s>",
    ]
    trained = [ByteTokenizer().decode(sample.token_ids_S[sample.weights_S > 0]) for sample in samples]
    assert trained == ["Hello.</s>", "5</s>", "bash</s>", "größe 🙂</s>"]
    assert [sample.sample_id for sample in samples] == [f"instructions#{row}" for row in range(4)]


def test_with_padding_equal_to_end_of_sequence_exactly_three_tokens_are_trained() -> None:
    (sample,) = chosen(rows_of({"prompt": "<s> who are", "completion": "a robot"}), WordTokenizer()).train
    assert sample.token_ids_S.tolist() == [1, 11, 12, 21, 22, 2]
    assert sample.weights_S.tolist() == [0, 0, 0, 1, 1, 1]
    assert sample.num_trained_tokens == 3


def test_a_prompt_that_fills_max_tokens_is_refused_with_a_count() -> None:
    source = rows_of({"prompt": "p" * 16, "completion": "answer"}, {"prompt": "p", "completion": "answer"})
    selection = chosen(source, max_tokens=16, length_policy="truncate_end")
    assert [sample.sample_id for sample in selection.train] == ["rows#1"]
    assert selection.refusals["nothing_trained"].count == 1
    assert selection.refusals["nothing_trained"].examples == ("rows#0",)
    assert selection.examined == 2


def test_a_long_row_is_cut_at_its_end_and_says_so() -> None:
    source = rows_of({"prompt": "p" * 10, "completion": "0123456789"})
    (sample,) = chosen(source, max_tokens=16, length_policy="truncate_end").train
    assert ByteTokenizer().decode(sample.token_ids_S) == "pppppppppp012345"
    assert sample.num_trained_tokens == 6
    assert sample.cuts == ("cut_at_end",)
    (sample,) = chosen(source, max_tokens=21, length_policy="truncate_end").train
    assert sample.cuts == ()


@pytest.mark.parametrize("policy", ["refuse", "shorten_observations", "drop_oldest"])
def test_a_policy_that_does_not_cut_rows_refuses_the_long_ones(policy) -> None:
    source = rows_of({"prompt": "p" * 10, "completion": "0123456789"}, {"prompt": "p", "completion": "a"})
    selection = chosen(source, max_tokens=16, length_policy=policy)
    assert [sample.sample_id for sample in selection.train] == ["rows#1"]
    assert selection.refusals["too_long"].detail.startswith("21 tokens, data.max_tokens is 16")


def test_loss_on_all_trains_everything_but_the_first_token() -> None:
    (sample,) = chosen(rows_of({"prompt": "ab", "completion": "c"}), loss_on="all").train
    assert sample.weights_S.tolist() == [0, 1, 1, 1]
    (sample,) = chosen(rows_of({"prompt": "", "completion": "c"})).train
    assert sample.weights_S.tolist() == [0, 1]


def test_the_selection_of_a_seed_never_changes() -> None:
    source = rows_of(*({"prompt": f"{row}", "completion": "x"} for row in range(20)))
    selection = chosen(source, train_rows=3, evaluation_rows=2)
    # The five smallest of `printf "42:rows#$i" | sha256sum`, in that order.
    assert [sample.sample_id for sample in selection.train] == SELECTED[:3]
    assert [sample.sample_id for sample in selection.evaluation] == SELECTED[3:]
    assert selection.examined == 5


@given(seed=st.integers(0, 1000), train=st.integers(1, 6), held=st.integers(0, 3))
def test_a_selection_is_the_first_trainable_candidates_in_hash_order(seed, train, held) -> None:
    texts = ["p" * (30 if row % 3 == 0 else 3) for row in range(24)]
    source = rows_of(*({"prompt": text, "completion": "x"} for text in texts))
    by_hash = sorted(range(24), key=lambda row: hashlib.sha256(f"{seed}:rows#{row}".encode()).hexdigest())
    trainable = [f"rows#{row}" for row in by_hash[: 2 * (train + held)] if row % 3 != 0]
    fields = {"seed": seed, "max_tokens": 20, "length_policy": "truncate_end"}
    if len(trainable) < train + held:
        with pytest.raises(InputError, match="can be trained, nothing_trained"):
            chosen(source, train_rows=train, evaluation_rows=held or None, **fields)
        return
    selection = chosen(source, train_rows=train, evaluation_rows=held or None, **fields)
    assert [sample.sample_id for sample in selection.train] == trainable[:train]
    assert [sample.sample_id for sample in selection.evaluation] == trainable[train : train + held]


def test_evaluation_rows_alone_hold_out_the_last_in_hash_order() -> None:
    source = rows_of(*({"prompt": f"{row}", "completion": "x"} for row in range(6)))
    selection = chosen(source, evaluation_rows=2)
    by_hash = sorted(range(6), key=lambda row: hashlib.sha256(f"42:rows#{row}".encode()).hexdigest())
    assert [sample.sample_id for sample in selection.evaluation] == [f"rows#{row}" for row in by_hash[-2:]]
    assert len(selection.train) == 4


def test_fewer_rows_than_wanted_is_an_error_with_the_numbers() -> None:
    with pytest.raises(InputError, match=r"data.train_rows = 9 asked for, but only 2 of the 2 rows examined"):
        chosen(read_row_file(ROWS / "completions.jsonl"), train_rows=9)


def test_rows_count_from_nought_and_blank_lines_do_not() -> None:
    source = read_row_file(ROWS / "instructions.jsonl")
    assert source.lines == [1, 3, 4, 5]
    assert source.row_id(1) == "instructions#1"
    assert source.place(1).endswith("instructions.jsonl:3")


def test_a_json_list_and_a_jsonl_file_give_the_same_rows() -> None:
    assert list(read_row_file(ROWS / "instructions.json").rows) == list(
        read_row_file(ROWS / "instructions.jsonl").rows[:2]
    )


def test_a_conversational_row_becomes_a_trajectory_with_arguments_as_text() -> None:
    source = read_row_file(ROWS / "conversations.jsonl")
    first = conversation(source.rows[0], "c#0", "c.jsonl:1")
    assert [message.role for message in first.messages] == ["system", "user", "assistant"]
    assert first.messages[2].content == ""
    assert first.messages[2].reasoning == "I list them."
    assert json.loads(first.messages[2].tool_calls[0].arguments) == {"command": "ls"}
    assert first.tools[0]["function"]["name"] == "bash"
    second = conversation(source.rows[1], "c#1", "c.jsonl:2")
    assert second.messages[1].tool_calls[0].arguments == '{"command": "ls"}'
    assert second.messages[2].observation
    assert second.messages[2].tool_call_id == "c1"


def test_a_conversational_row_goes_through_the_renderer_under_its_own_id() -> None:
    samples = chosen(read_row_file(ROWS / "conversations.jsonl")).train
    assert [sample.sample_id for sample in samples] == ["conversations#0", "conversations#1"]
    assert (
        {sample.task_id for sample in samples}
        == {sample.group_id for sample in samples}
        == {
            "conversations#0",
            "conversations#1",
        }
    )
    assert ByteTokenizer().decode(samples[1].token_ids_S) == "List the files.a.txtThere is a.txt.</s>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"instruction": "a", "output": "b"}\n{"instruction": "a"', r"bad\.jsonl:2: not JSON"),
        (b'{"instruction": "a", "output": "b"}\n{"prompt": "a", "completion": "b"}', r"bad\.jsonl:2: a prompt_comp"),
        (b'{"instruction": "a", "output": null}', r"bad\.jsonl:1: field 'output' must be text, it is a NoneType"),
        (b'{"question": "a"}', r"bad\.jsonl:1: a row with the fields 'question'"),
        (b'["a"]', r"bad\.jsonl:1: a row must be a JSON object"),
        (b'{"prompt": "a", "completion": []}', r"bad\.jsonl:1: prompt and completion must both be"),
        (b'{"instruction": "\xe4", "output": "b"}', r"bad\.jsonl:1: not UTF-8 text"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", r"bad\.jsonl:1: not UTF-8 text"),
        (b"\n \n", r"bad\.jsonl: holds no row"),
        (b"", r"bad\.jsonl: holds no row"),
    ],
)
def test_a_bad_row_is_an_error_that_names_its_line(tmp_path, content, message) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_row_file(path)


def test_files_of_another_kind_say_where_they_belong(tmp_path) -> None:
    for row, hint in (
        ({"messages": []}, "traceforge ingest"),
        ({"trajectory_id": "a", "messages": []}, "traceforge ingest"),
        ({"sample_id": "a#0", "trajectory_id": "a"}, "pass its folder"),
    ):
        (tmp_path / "x.jsonl").write_text(json.dumps(row))
        with pytest.raises(InputError) as caught:
            read_row_file(tmp_path / "x.jsonl")
        assert hint in caught.value.hint


def test_a_byte_order_mark_a_lone_surrogate_and_crlf_do_no_harm(tmp_path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a\\ud800b", "completion": "\\ud83d\\ude42"}\r\n')
    assert read_row_file(path).rows == [{"prompt": "a�b", "completion": "🙂"}]


def test_a_completion_of_several_messages_is_refused_by_name() -> None:
    row = {"prompt": [], "completion": [{"role": "assistant", "content": "a"}] * 2}
    with pytest.raises(InputError, match="x:1: completion must be one assistant message, it has 2 messages"):
        conversation(row, "x#0", "x:1")
    with pytest.raises(InputError, match="a message has role 'robot'"):
        conversation({"prompt": [{"role": "robot"}], "completion": row["completion"][:1]}, "x#0", "x:1")


def test_settings_that_rows_cannot_honour_are_refused() -> None:
    source = rows_of({"prompt": "a", "completion": "b"})
    with pytest.raises(ConfigError, match=r"data.rendering = 'transcript' needs turns"):
        chosen(source, rendering="transcript")
    with pytest.raises(ConfigError, match=r"data.target = 'action' needs turns"):
        chosen(source, target="action")
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        chosen(source, tokenizer)


def test_token_ids_are_plain_integers_whatever_the_tokenizer_returns() -> None:
    class ArrayTokenizer(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return np.array(super().encode(text, add_special_tokens=add_special_tokens))

    (sample,) = chosen(rows_of({"prompt": "ab", "completion": "c"}), ArrayTokenizer()).train
    assert sample.token_ids_S.dtype == np.int64
    assert sample.token_ids_S.tolist() == [100, 101, 102, 2]


def test_only_owner_and_name_look_like_a_hub_id() -> None:
    assert hub_rows.is_hub_id("tatsu-lab/alpaca")
    assert not any(map(hub_rows.is_hub_id, ("alpaca", "data/rows.jsonl", "a/b/c", "/a/b", "./a", "../a", "~/a")))


def test_a_commit_is_its_own_resolution() -> None:
    assert hub_rows.resolve_commit("owner/name", "0123456789" * 4) == "0123456789" * 4


def test_a_hub_that_cannot_be_reached_is_named_with_the_way_out(monkeypatch) -> None:
    import huggingface_hub

    class Offline:
        def dataset_info(self, dataset_id, revision):
            raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "HfApi", Offline)
    with pytest.raises(HubError, match=r"owner/name: no such file.*revision main.*no route to host") as caught:
        hub_rows.resolve_commit("owner/name", "main")
    assert "local file" in caught.value.hint


def test_null_keys_that_columns_add_are_taken_out_of_hub_rows(monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = {}

    def fake(dataset_id, *, revision, split):
        asked.update(id=dataset_id, revision=revision, split=split)
        tools = [{"function": {"name": "x", "parameters": {"a": {"type": "string"}, "b": None}}}]
        message = {"role": "assistant", "content": "hi", "tool_calls": None}
        return [{"prompt": [{"role": "user", "content": "go"}], "completion": [message], "tools": tools}]

    monkeypatch.setattr(datasets, "load_dataset", fake)
    loaded = hub_rows.load_hub_rows("owner/name", "f" * 40)
    assert asked == {"id": "owner/name", "revision": "f" * 40, "split": "train"}
    assert loaded.rows[0]["tools"][0]["function"]["parameters"] == {"a": {"type": "string"}}
    assert loaded.row_id(0) == "owner/name#0"
