"""mini-swe-agent: both versions, the variant, bare lists, Responses objects, exits, format errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trajectory_logs import ANSWER, BUNDLED, USER, call, ingested, mini_log, result, write_json

from traceforge.trajectories.readers.mini_swe_agent import BASH_TOOL
from traceforge.trajectories.record import Trajectory

V1, V2 = BUNDLED / "mini-swe-agent-v1", BUNDLED / "mini-swe-agent-v2"


def read_one(value: Any, tmp_path: Path) -> Trajectory:
    (trajectory,) = ingested(write_json(tmp_path / "log.traj.json", value), tmp_path / "out").trajectories
    return trajectory


def raw_messages(path: Path) -> list[dict[str, Any]]:
    held = json.loads(path.read_bytes())
    messages: list[dict[str, Any]] = held if isinstance(held, list) else held["messages"]
    return messages


def test_version_1_keeps_every_message_word_for_word(tmp_path: Path) -> None:
    path = V1 / "astropy__astropy-12907.traj.json"
    (trajectory,) = ingested(path, tmp_path / "out").trajectories
    raw = raw_messages(path)
    assert [(each.role, each.content) for each in trajectory.messages] == [
        (each["role"], each["content"]) for each in raw
    ]
    assert len(trajectory.turns()) == 20
    assert (trajectory.trajectory_id, trajectory.task_id) == ("astropy__astropy-12907", "astropy__astropy-12907")
    assert (trajectory.source_format, trajectory.exit_status) == ("mini-swe-agent-v1", "Submitted")
    assert (trajectory.model, trajectory.scaffold) == ("google/gemini-3-pro-preview", "mini-swe-agent 1.15.0")
    assert trajectory.tools == ()


def test_version_1_reasoning_is_dug_out_of_the_providers_reply(tmp_path: Path) -> None:
    path = V1 / "astropy__astropy-12907.traj.json"
    (trajectory,) = ingested(path, tmp_path / "out").trajectories
    replies = [
        each.get("extra", {}).get("response", {}).get("choices", [{}])[0].get("message", {})
        for each in raw_messages(path)
    ]
    expected = {index: reply["reasoning"] for index, reply in enumerate(replies) if reply.get("reasoning")}
    assert expected
    assert {index: each.reasoning for index, each in enumerate(trajectory.messages) if each.reasoning} == expected


def test_text_scaffolds_mark_every_user_message_after_the_first_answer_as_an_observation(tmp_path: Path) -> None:
    for name, num_turns in (("astropy__astropy-12907", 20), ("local", 2), ("github_issue", 10)):
        (trajectory,) = ingested(V1 / f"{name}.traj.json", tmp_path / name).trajectories
        assert len(trajectory.turns()) == num_turns
        assert trajectory.source_format == "mini-swe-agent-v1"
        assert [each.observation for each in trajectory.messages] == [
            index > 2 and each.role == "user" for index, each in enumerate(trajectory.messages)
        ]


def test_version_2_has_calls_reasoning_the_bash_tool_and_no_exit(tmp_path: Path) -> None:
    path = V2 / "derived__scikit-learn__scikit-learn-14141.traj.json"
    (trajectory,) = ingested(path, tmp_path / "out").trajectories
    raw = [each for each in raw_messages(path) if each["role"] != "exit"]
    assert len(trajectory.messages) == len(raw) == 14
    assert len(trajectory.turns()) == 5
    assert trajectory.tools == (BASH_TOOL,)
    assert (trajectory.source_format, trajectory.task_id) == ("mini-swe-agent-v2", "scikit-learn__scikit-learn-14141")
    for message, logged in zip(trajectory.messages, raw, strict=True):
        assert message.content == (logged["content"] or "")
        assert message.reasoning == logged.get("reasoning_content")
        assert message.tool_call_id == logged.get("tool_call_id")
        assert message.observation == (logged["role"] == "tool")
        assert [(each.id, each.name, each.arguments) for each in message.tool_calls] == [
            (each["id"], each["function"]["name"], each["function"]["arguments"])
            for each in logged.get("tool_calls", [])
        ]
    assert trajectory.messages[-1].tool_calls, "the calls of the last turn stay, though nobody answered them"


def test_the_variant_without_tool_calls_gets_them_from_its_actions(tmp_path: Path) -> None:
    path = V2 / "specvariant__django__django-10973.traj.json"
    (trajectory,) = ingested(path, tmp_path / "out").trajectories
    raw = [each for each in raw_messages(path) if each["role"] != "exit"]
    results: list[str] = []
    for message, logged in zip(trajectory.messages, raw, strict=True):
        actions = logged.get("extra", {}).get("actions", [])
        assert [(each.name, json.loads(each.arguments)) for each in message.tool_calls] == [
            (each["function"]["name"], each["function"]["arguments"]) for each in actions
        ]
        results += [message.tool_call_id] if message.tool_call_id else []
    ids = [each.id for message in trajectory.messages for each in message.tool_calls]
    assert [each for each in ids if each] == results == [each["tool_call_id"] for each in raw if each["role"] == "tool"]
    assert trajectory.messages[-1].tool_calls[0].id is None
    assert trajectory.tools == (BASH_TOOL,)


def test_the_marker_is_not_needed_and_names_do_not_matter(tmp_path: Path) -> None:
    held = json.loads((V2 / "derived__scikit-learn__scikit-learn-14141.traj.json").read_bytes())
    del held["trajectory_format"]
    path = write_json(tmp_path / "notes.txt", held)
    assert ingested(path, tmp_path / "out").trajectories[0].source_format == "mini-swe-agent-v2"
    old = json.loads((V1 / "astropy__astropy-12907.traj.json").read_bytes())
    del old["trajectory_format"], old["instance_id"]
    trajectory = read_one(old, tmp_path)
    assert (trajectory.source_format, trajectory.task_id) == ("mini-swe-agent-v1", "log")


def test_a_plain_bare_list_is_a_chat_and_its_users_are_people(tmp_path: Path) -> None:
    trajectory = read_one([USER, ANSWER, USER, {**ANSWER, "content": "Still."}], tmp_path)
    assert trajectory.source_format == "openai-messages"
    assert not any(each.observation for each in trajectory.messages)


def test_format_errors_are_observations_and_user_follows_user(tmp_path: Path) -> None:
    error = {"role": "user", "content": "Please call one tool.", "extra": {"interrupt_type": "FormatError"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call("a")]}
    person = {"role": "user", "content": "Stop that.", "extra": {"interrupt_type": "UserInterruption"}}
    trajectory = read_one(
        mini_log([error, turn, result("a"), error, error, person, {**turn, "tool_calls": [call("b")]}]), tmp_path
    )
    assert [each.role for each in trajectory.messages] == [
        "system",
        "user",
        "user",
        "assistant",
        "tool",
        "user",
        "user",
        "user",
        "assistant",
    ]
    assert [each.observation for each in trajectory.messages] == [
        False,
        False,
        True,
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_text_based_version_2_has_user_observations_and_no_tools(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "```mswea_bash_command\nls\n```", "extra": {"actions": [{"command": "ls"}]}}
    seen = {"role": "user", "content": "<returncode>0</returncode>", "extra": {"returncode": 0, "raw_output": ""}}
    end = {"role": "exit", "content": "", "extra": {"exit_status": "LimitsExceeded", "submission": ""}}
    log = mini_log([turn, seen, turn, end])
    del log["info"]["exit_status"]
    trajectory = read_one(log, tmp_path)
    assert [each.role for each in trajectory.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [each.observation for each in trajectory.messages] == [False, False, False, True, False]
    assert (trajectory.tools, trajectory.exit_status, trajectory.source_format) == (
        (),
        "LimitsExceeded",
        "mini-swe-agent-v2",
    )


def test_responses_objects_become_turns(tmp_path: Path) -> None:
    output = [
        {
            "type": "reasoning",
            "id": "r",
            "summary": [{"type": "summary_text", "text": "Plan."}, {"type": "summary_text", "text": "Act."}],
            "encrypted_content": "secret",
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Looking"}, {"type": "output_text", "text": "."}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "bash", "arguments": '{"command": "ls"}'},
    ]
    error = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "No call."}],
        "extra": {"interrupt_type": "FormatError"},
    }
    answered = {"type": "function_call_output", "call_id": "call_1", "output": "a.py", "extra": {"returncode": 0}}
    log = mini_log([error, {"object": "response", "model": "gpt-5", "output": output, "extra": {"cost": 0}}, answered])
    log["info"] = {}
    trajectory = read_one(log, tmp_path)
    turn = trajectory.messages[3]
    assert (turn.role, turn.content, turn.reasoning) == ("assistant", "Looking.", "Plan.\n\nAct.")
    assert [(each.id, each.name, each.arguments) for each in turn.tool_calls] == [
        ("call_1", "bash", '{"command": "ls"}')
    ]
    assert (trajectory.messages[4].role, trajectory.messages[4].tool_call_id, trajectory.messages[4].content) == (
        "tool",
        "call_1",
        "a.py",
    )
    assert trajectory.messages[2].observation
    assert (trajectory.model, trajectory.tools) == ("gpt-5", (BASH_TOOL,))
    assert b"secret" not in (tmp_path / "out" / "trajectories.jsonl").read_bytes()


def test_a_responses_item_nobody_knows_is_refused(tmp_path: Path) -> None:
    turn = {"object": "response", "output": [{"type": "web_search_call", "id": "x"}]}
    write_json(tmp_path / "logs" / "a.json", mini_log([turn]))
    write_json(tmp_path / "logs" / "b.json", mini_log([ANSWER]))
    out = ingested(tmp_path / "logs", tmp_path / "out")
    assert out.reasons == [("a.json", None, "unsupported_content")]
    assert "message 2, output 0" in out.details()


def test_actions_with_a_call_id_are_calls_even_without_tool_calls(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": None, "extra": {"actions": [{"command": "echo ü", "tool_call_id": "a"}]}}
    trajectory = read_one(mini_log([turn, result("a")]), tmp_path)
    assert [(each.id, each.name, each.arguments) for each in trajectory.messages[2].tool_calls] == [
        ("a", "bash", '{"command":"echo ü"}')
    ]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no_messages"),
        ([{"role": "exit", "content": "", "extra": {"exit_status": "APIError"}}], "no_messages"),
        ([{"role": "system", "content": "s"}, USER], "no_assistant_turn"),
        (None, "no_messages"),
    ],
)
def test_logs_of_runs_that_never_answered_are_refused(messages: object, reason: str, tmp_path: Path) -> None:
    write_json(tmp_path / "logs" / "a.json", {**mini_log([]), "messages": messages})
    write_json(tmp_path / "logs" / "b.json", mini_log([ANSWER]))
    assert ingested(tmp_path / "logs", tmp_path / "out").reasons == [("a.json", None, reason)]


def test_calls_of_tools_that_mini_swe_agent_does_not_declare_are_counted(tmp_path: Path) -> None:
    other = {"id": "a", "type": "function", "function": {"name": "python", "arguments": "{}"}}
    path = write_json(tmp_path / "log.json", mini_log([{"role": "assistant", "content": "", "tool_calls": [other]}]))
    assert ingested(path, tmp_path / "out").manifest["notes"] == {"calls_of_undeclared_tools": 1}
