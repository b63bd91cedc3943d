"""Tool calls, their arguments and results, and the schemas of the tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trajectory_logs import ANSWER, USER, call, ingested, messages_of, refusal_of, result, write_rows

from traceforge.trajectories.record import ToolCall


def test_arguments_stay_the_string_that_was_logged(tmp_path: Path) -> None:
    logged = ['{"city":"SF"}', '{ "city" : "SF" }', "{not json", "", '{"a": "\\u00e9"}']
    calls = [call(str(index), arguments=each) for index, each in enumerate(logged)]
    message = messages_of([USER, {"role": "assistant", "content": None, "tool_calls": calls}], tmp_path)[1]
    assert [each.arguments for each in message.tool_calls] == logged


def test_arguments_given_as_an_object_are_encoded_once_and_stay_readable(tmp_path: Path) -> None:
    given = {"city": "Zürich", "n": 12345678901234567890123, "deep": [None, True, {"a": '"q"'}]}
    message = messages_of([USER, {"role": "assistant", "tool_calls": [call("a", arguments=given)]}], tmp_path)[1]
    arguments = message.tool_calls[0].arguments
    assert arguments == '{"city":"Zürich","n":12345678901234567890123,"deep":[null,true,{"a":"\\"q\\""}]}'
    assert json.loads(arguments) == given


def test_text_and_two_calls_in_one_turn_are_all_kept_in_order(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "Looking.", "tool_calls": [call("a", "ls"), call("b", "pwd")]}
    messages = messages_of([USER, turn, result("a", "1"), result("b", "2"), ANSWER], tmp_path)
    assert messages[1].content == "Looking."
    assert [(each.id, json.loads(each.arguments)["command"]) for each in messages[1].tool_calls] == [
        ("a", "ls"),
        ("b", "pwd"),
    ]
    assert [(each.role, each.tool_call_id, each.observation) for each in messages[2:4]] == [
        ("tool", "a", True),
        ("tool", "b", True),
    ]


def test_results_in_swapped_order_still_answer_their_own_calls(tmp_path: Path) -> None:
    turn = {"role": "assistant", "tool_calls": [call("a", "ls"), call("b", "pwd")]}
    messages = messages_of([USER, turn, result("b", "of b"), result("a", "of a"), ANSWER], tmp_path)
    assert [each.id for each in messages[1].tool_calls] == ["a", "b"]
    assert [(each.tool_call_id, each.content) for each in messages[2:4]] == [("b", "of b"), ("a", "of a")]


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "tool_calls": [call("a")]}, result("zz")],
        [USER, ANSWER, result(None)],
        [USER, {"role": "assistant", "tool_calls": [call("a")]}, result("a"), result("a")],
        [USER, result("a"), {"role": "assistant", "tool_calls": [call("a")]}],
    ],
)
def test_a_result_no_call_asked_for_is_refused_and_named(messages: list[Any], tmp_path: Path) -> None:
    refusal = refusal_of(messages, tmp_path)
    assert refusal["reason"] == "orphan_tool_result"
    place = max(index for index, each in enumerate(messages) if each["role"] == "tool")
    assert f"message {place}" in refusal["detail"]


def test_order_pairs_within_the_newest_turn(tmp_path: Path) -> None:
    turn = {"role": "assistant", "tool_calls": [call(None)]}
    messages = messages_of([USER, turn, USER, turn, result("r")], tmp_path)
    assert [each.id for index in (1, 3) for each in messages[index].tool_calls] == [None, "r"]


def test_an_id_may_be_used_again_in_a_later_turn(tmp_path: Path) -> None:
    turn = {"role": "assistant", "tool_calls": [call("same")]}
    messages = messages_of([USER, turn, result("same", "1"), turn, result("same", "2"), turn], tmp_path)
    assert [each.tool_call_id for each in messages] == [None, None, "same", None, "same", None]


def test_calls_without_ids_take_those_of_the_results_in_order(tmp_path: Path) -> None:
    turn = {"role": "assistant", "tool_calls": [call(None, "ls"), call(None, "pwd")]}
    messages = messages_of([USER, turn, result("r1"), result("r2"), turn, result("r3")], tmp_path)
    assert [each.id for each in messages[1].tool_calls] == ["r1", "r2"]
    assert [each.id for each in messages[4].tool_calls] == ["r3", None]


def test_a_result_without_an_id_takes_its_calls(tmp_path: Path) -> None:
    turn = {"role": "assistant", "tool_calls": [call("a"), call("b")]}
    messages = messages_of([USER, turn, result(None), result(None)], tmp_path)
    assert [each.tool_call_id for each in messages[2:]] == ["a", "b"]


def test_legacy_function_calls_are_tool_calls(tmp_path: Path) -> None:
    legacy = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "look", "arguments": "{}"},
        "tool_calls": [],
    }
    messages = messages_of([USER, legacy, {"role": "function", "name": "look", "content": "seen"}, ANSWER], tmp_path)
    assert messages[1].tool_calls == (ToolCall(name="look", arguments="{}"),)
    assert (messages[2].role, messages[2].content, messages[2].observation) == ("tool", "seen", True)


@pytest.mark.parametrize("calls", [[{"id": "a"}], ["ls"], [{"id": "a", "function": {"arguments": "{}"}}], "ls"])
def test_a_call_that_names_no_function_is_refused(calls: object, tmp_path: Path) -> None:
    refusal = refusal_of([USER, {"role": "assistant", "tool_calls": calls}], tmp_path)
    assert refusal["reason"] == "bad_tool_call"
    assert "message 1" in refusal["detail"]


def function(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def test_each_tool_keeps_its_own_keys_and_types_may_differ_between_rows(tmp_path: Path) -> None:
    first = [function("one", a={"type": "string"}), function("two", b={"type": "string"})]
    rows = [
        {
            "messages": [USER, {**ANSWER, "content": f"{kind}"}],
            "tools": [function("t", t={"type": kind, "default": default})],
        }
        for kind, default in (("string", "x"), ("integer", 1))
    ]
    out = ingested(
        write_rows(tmp_path / "rows.jsonl", {"messages": [USER, ANSWER], "tools": first}, *rows), tmp_path / "out"
    )
    assert list(out.trajectories[0].tools) == first
    assert [each.tools[0]["function"]["parameters"]["properties"]["t"]["default"] for each in out.trajectories[1:]] == [
        "x",
        1,
    ]
    assert out.manifest["notes"] == {}


def test_nulls_that_a_column_store_put_into_schemas_are_dropped_and_counted(tmp_path: Path) -> None:
    clean = function("one", a={"type": "string", "default": None, "enum": ["x", None]}, default={"type": "string"})
    dirty = function(
        "one",
        a={**clean["function"]["parameters"]["properties"]["a"], "description": None},
        b=None,
        default={"type": "string", "items": None},
    )
    dirty["function"]["strict"] = None
    out = ingested(
        write_rows(tmp_path / "rows.jsonl", {"messages": [USER, ANSWER], "tools": [dirty]}), tmp_path / "out"
    )
    assert list(out.trajectories[0].tools) == [clean]
    assert out.manifest["notes"] == {"null_schema_keys": 4}


@pytest.mark.parametrize("form", ["bare", "text", "legacy"])
def test_tools_come_in_several_forms(form: str, tmp_path: Path) -> None:
    tool = function("one", a={"type": "string"})
    row: dict[str, Any] = {
        "bare": {"tools": [{"type": "function", **tool["function"]}]},
        "text": {"tools": json.dumps([tool])},
        "legacy": {"functions": [tool["function"]]},
    }[form]
    out = ingested(write_rows(tmp_path / "rows.jsonl", {"messages": [USER, ANSWER], **row}), tmp_path / "out")
    assert list(out.trajectories[0].tools) == [tool]


@pytest.mark.parametrize(
    "tools", [{"a": 1}, [1], [{"type": "function"}], [{"name": "x", "input_schema": {}}], "[", [{"type": "web_search"}]]
)
def test_tools_that_are_no_functions_are_refused(tools: object, tmp_path: Path) -> None:
    assert refusal_of([USER, ANSWER, USER], tmp_path, tools=tools)["reason"] in ("bad_tools", "truncated_json")


def test_a_schema_with_nan_is_refused_and_not_turned_into_null(tmp_path: Path) -> None:
    row = json.dumps(
        {"messages": [USER, ANSWER, USER], "tools": [function("f", a={"type": "number", "default": float("nan")})]}
    )
    path = write_rows(tmp_path / "rows.jsonl", {"messages": [USER, ANSWER]}, row)
    assert ingested(path, tmp_path / "out").reasons == [("rows.jsonl", 2, "bad_tools")]
