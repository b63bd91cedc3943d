"""Chat rows: content, reasoning, flags, ids, outcomes, and what is no chat row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trajectory_logs import (
    ANSWER,
    BUNDLED,
    USER,
    call,
    ingested,
    messages_of,
    refusal_of,
    result,
    write_json,
    write_rows,
)


def test_the_bundled_rows_keep_every_turn(tmp_path: Path) -> None:
    out = ingested(BUNDLED / "openai-messages", tmp_path / "out")
    assert out.summary.counts.trajectories == 10
    assert out.summary.counts.turns == 10
    assert out.summary.counts.messages == 23
    assert [each.trajectory_id for each in out.trajectories] == [f"conversations:{line}" for line in range(1, 11)]
    assert {each.source_format for each in out.trajectories} == {"openai-messages"}
    assert out.trajectories[0].messages[1].content == "The capital of France is Paris."
    assert not any(message.observation for each in out.trajectories for message in each.messages)


def test_null_content_is_empty_text_and_never_the_word_none(tmp_path: Path) -> None:
    messages = messages_of(
        [USER, {"role": "assistant", "content": None, "tool_calls": [call("a")]}, result("a")], tmp_path
    )
    assert messages[1].content == ""
    assert "None" not in (tmp_path / "out" / "trajectories.jsonl").read_text()


def test_text_parts_are_joined_without_anything_between(tmp_path: Path) -> None:
    parts = [{"text": "a"}, {"type": "text", "text": "b\n"}, "c", {"type": "input_text", "text": ""}]
    assert messages_of([{"role": "user", "content": parts}, ANSWER], tmp_path)[0].content == "ab\nc"


@pytest.mark.parametrize("kind", ["image_url", "image", "input_image"])
def test_an_image_refuses_the_trajectory_and_names_the_message(kind: str, tmp_path: Path) -> None:
    picture = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, kind: {"url": "x"}}]}
    refusal = refusal_of([USER, ANSWER, picture, ANSWER], tmp_path)
    assert refusal["reason"] == "image_content"
    assert "message 2, content part 1" in refusal["detail"]


@pytest.mark.parametrize("part", [{"type": "input_audio"}, {"type": "tool_use", "id": "x", "name": "f", "input": {}}])
def test_parts_that_are_not_text_are_refused_and_not_lost(part: dict[str, Any], tmp_path: Path) -> None:
    assert refusal_of([{"role": "user", "content": [part]}, ANSWER], tmp_path)["reason"] == "unsupported_content"


@pytest.mark.parametrize("content", [5, True, {"text": "a"}, [7], [{"type": "text"}]])
def test_content_of_another_type_is_refused(content: object, tmp_path: Path) -> None:
    refusal = refusal_of([{"role": "user", "content": content}, ANSWER], tmp_path)
    assert refusal["reason"] == "bad_content"
    assert "message 0" in refusal["detail"]


@pytest.mark.parametrize(
    "where",
    [
        {"reasoning_content": "Let me think."},
        {"reasoning": "Let me think."},
        {"thinking_blocks": [{"type": "thinking", "thinking": "Let me think.", "signature": "xyz"}]},
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "Let me think."},
                {"type": "reasoning.encrypted", "data": "xyz"},
            ]
        },
        {"content": [{"type": "reasoning", "reasoning": "Let me think."}, {"type": "text", "text": "Because."}]},
        {
            "content": [
                {"type": "thinking", "thinking": "Let me think."},
                {"type": "redacted_thinking", "data": "xyz"},
                "Because.",
            ]
        },
        {"content": "<think>\nLet me think.\n</think>\n\nBecause."},
        {"content": "\n<think>Let me think.</think>Because."},
        {"reasoning": None, "extra": {"response": {"choices": [{"message": {"reasoning": "Let me think."}}]}}},
        {"reasoning": "", "extra": {"response": {"choices": [{"message": {"reasoning_content": "Let me think."}}]}}},
        {"provider_specific_fields": {"reasoning_content": "Let me think."}},
        {"reasoning_content": "Let me think.", "content": "<think>\nLet me think.\n</think>\n\nBecause."},
    ],
)
def test_reasoning_is_found_wherever_it_hides(where: dict[str, Any], tmp_path: Path) -> None:
    message = messages_of([USER, {**ANSWER, **where}], tmp_path)[1]
    assert (message.content, message.reasoning) == ("Because.", "Let me think.")
    assert "xyz" not in (tmp_path / "out" / "trajectories.jsonl").read_text()


def test_tags_in_the_middle_of_a_text_and_empty_thoughts_are_left_alone(tmp_path: Path) -> None:
    spoken = "Use <think>x</think> here."
    messages = messages_of(
        [
            USER,
            {"role": "assistant", "content": spoken},
            USER,
            {"role": "assistant", "content": "<think>\n\n</think>\n\nYes."},
        ],
        tmp_path,
    )
    assert (messages[1].content, messages[1].reasoning) == (spoken, None)
    assert (messages[3].content, messages[3].reasoning) == ("Yes.", None)


def test_two_different_reasonings_lose_neither(tmp_path: Path) -> None:
    message = messages_of([USER, {"role": "assistant", "reasoning": "A", "content": "<think>B</think>C"}], tmp_path)[1]
    assert (message.reasoning, message.content) == ("A", "<think>B</think>C")


def test_developer_becomes_system_and_a_refusal_becomes_text(tmp_path: Path) -> None:
    messages = messages_of(
        [
            {"role": "developer", "content": "Be kind."},
            USER,
            {"role": "assistant", "content": None, "refusal": "I cannot."},
        ],
        tmp_path,
    )
    assert messages[0].role == "system"
    assert messages[2].content == "I cannot."


def test_an_unknown_role_is_refused_by_name(tmp_path: Path) -> None:
    refusal = refusal_of([USER, ANSWER, {"role": "critic", "content": "x"}], tmp_path)
    assert refusal["reason"] == "unknown_role"
    assert "message 2" in refusal["detail"]
    assert "critic" in refusal["detail"]


def test_weight_loss_and_train_flags_reach_the_record_for_tool_call_turns_too(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [call("a")]}
    messages = messages_of(
        [
            USER,
            {**turn, "weight": 0},
            result("a"),
            {**ANSWER, "weight": 1},
            {**ANSWER, "loss": False},
            {**ANSWER, "train": True},
            ANSWER,
        ],
        tmp_path,
    )
    assert [each.trained for each in messages] == [None, False, None, True, False, True, None]


@pytest.mark.parametrize("flags", [{"weight": 0.5}, {"weight": "1"}, {"weight": 1, "loss": False}])
def test_flags_that_cannot_be_honoured_are_refused(flags: dict[str, Any], tmp_path: Path) -> None:
    assert refusal_of([USER, {**ANSWER, **flags}], tmp_path)["reason"] == "bad_flag"


def test_a_row_brings_its_ids_outcome_and_model(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [USER, {**ANSWER, "content": "1"}],
            "instance_id": "a__b-1",
            "traj_id": "a__b-1.xyz",
            "resolved": True,
            "model": "m",
        },
        {
            "messages": [USER, {**ANSWER, "content": "2"}],
            "instance_id": "a__b-2_0",
            "run_id": "run_1",
            "resolved": 0,
            "reward": 0.25,
        },
        {
            "messages": [USER, {**ANSWER, "content": "3"}],
            "id": 7,
            "task_id": "t",
            "reward": -1,
            "exit_status": "submitted",
        },
        {"messages": [USER, {**ANSWER, "content": "4"}], "id": "hello.3-of-5.run", "resolved": None, "verified": True},
    ]
    first, second, third, fourth = ingested(write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "out").trajectories
    assert (first.trajectory_id, first.task_id, first.model, first.outcome.resolved) == (
        "a__b-1.xyz",
        "a__b-1",
        "m",
        True,
    )
    assert (second.trajectory_id, second.task_id) == ("a__b-2_0.run_1", "a__b-2")
    assert (second.outcome.resolved, second.outcome.reward) == (False, 0.25)
    assert (third.trajectory_id, third.task_id, third.outcome.reward, third.exit_status) == (
        "7",
        "t",
        -1.0,
        "submitted",
    )
    assert third.outcome.resolved is None
    assert (fourth.task_id, fourth.outcome.resolved) == ("hello", True)


def test_a_pull_request_number_is_no_run_suffix(tmp_path: Path) -> None:
    row = {"messages": [USER, ANSWER], "instance_id": "pandas-dev__pandas.95280573.pr_53652"}
    trajectory = ingested(write_rows(tmp_path / "rows.jsonl", row), tmp_path / "out").trajectories[0]
    assert trajectory.task_id == "pandas-dev__pandas.95280573.pr_53652"


def test_keys_that_are_not_read_are_counted_and_not_lost_silently(tmp_path: Path) -> None:
    rows = [{"messages": [USER, {**ANSWER, "content": str(n)}], "label": "x", "resolved": "yes"} for n in range(3)]
    out = ingested(write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "out")
    assert out.manifest["notes"] == {"unread_key:label": 3, "unread_value:resolved": 3}


def test_a_list_of_rows_one_row_and_a_bare_list_are_read_alike(tmp_path: Path) -> None:
    write_json(
        tmp_path / "logs" / "list.json",
        [{"messages": [USER, ANSWER, USER]}, {"messages": []}, {"messages": [USER, {**ANSWER, "name": "x"}]}],
    )
    write_json(tmp_path / "logs" / "one.json", {"messages": json.dumps([USER, {**ANSWER, "content": "2"}])})
    write_json(tmp_path / "logs" / "bare.json", [USER, {**ANSWER, "content": "3"}])
    (tmp_path / "logs" / "lines.json").write_text(
        "[\n"
        + ",\n".join(json.dumps({"messages": [USER, {**ANSWER, "content": f"line {n}"}]}) for n in range(3))
        + "\n]\n"
    )
    out = ingested(tmp_path / "logs", tmp_path / "out")
    assert [each.trajectory_id for each in out.trajectories] == [
        "bare:1",
        "lines:1",
        "lines:2",
        "lines:3",
        "list:1",
        "list:3",
        "one:1",
    ]
    assert out.reasons == [("list.json", None, "no_messages")]
    assert "item 2" in out.details()


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER], "response": {"choices": []}, "kwargs": {}},
        {"messages": [USER, ANSWER], "chosen": [ANSWER], "rejected": [ANSWER]},
        {"messages": [USER, ANSWER, USER], "label": False},
        {"prompt": "a", "completion": "b"},
        {"sessionId": "x", "projectHash": "y", "messages": [{"type": "user", "content": "hi"}]},
        {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [ANSWER]},
    ],
)
def test_what_holds_more_than_the_conversation_is_not_taken_for_a_chat_row(row: dict[str, Any], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"messages": [USER, ANSWER]}, row)
    assert ingested(path, tmp_path / "out").reasons == [("rows.jsonl", 2, "unknown_format")]


def test_a_system_prompt_beside_the_messages_is_refused_and_not_dropped(tmp_path: Path) -> None:
    assert refusal_of([USER, ANSWER, USER], tmp_path, system="Be kind.")["reason"] == "unsupported_content"


def test_a_row_without_a_system_message_gets_none_and_one_with_it_keeps_it_once(tmp_path: Path) -> None:
    assert [each.role for each in messages_of([USER, ANSWER, USER], tmp_path)] == ["user", "assistant", "user"]
    system = {"role": "system", "content": " Be kind.\n"}
    kept = messages_of([system, USER, ANSWER], tmp_path)
    assert [(each.role, each.content) for each in kept if each.role == "system"] == [("system", " Be kind.\n")]
