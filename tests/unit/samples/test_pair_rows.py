"""Preference rows to two conversations with one prompt: every form, and every way to be none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceforge.samples.pair_rows import PreferenceRow, read_pair_row, row_format
from traceforge.samples.pair_sides import PairRefused, ending_turns
from traceforge.trajectories.record import Message

DATA = Path(__file__).parents[2] / "data" / "pairs"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def user(content: Any = "Q?", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: Any = "A.", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def system(content: str = "Be brief.") -> dict[str, Any]:
    return {"role": "system", "content": content}


def call(call_id: str | None = "c1") -> dict[str, Any]:
    named = {} if call_id is None else {"id": call_id}
    return {**named, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def result(call_id: str = "c1", content: str = "rain") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def read(**row: Any) -> PreferenceRow:
    return read_pair_row(row, Counter())


def texts(messages: tuple[Message, ...]) -> list[str]:
    return [f"{message.role}: {message.content}" for message in messages]


def test_text_becomes_one_message_a_side() -> None:
    row = read(prompt="Q?", chosen=" yes", rejected="no")
    assert texts(row.chosen) == ["user: Q?", "assistant:  yes"]
    assert texts(row.rejected) == ["user: Q?", "assistant: no"]
    assert row.prompt_messages == 1


def test_messages_behind_a_prompt_are_its_endings() -> None:
    row = read(prompt=[system(), user()], chosen=[assistant("yes")], rejected=assistant("no"))
    assert texts(row.chosen) == ["system: Be brief.", "user: Q?", "assistant: yes"]
    assert texts(row.rejected)[2:] == ["assistant: no"]
    assert row.prompt_messages == 2


@pytest.mark.parametrize("prompt", ["Q?", [user()]])
def test_a_side_may_repeat_the_prompt(prompt: Any) -> None:
    row = read(prompt=prompt, chosen=[user(), assistant("yes")], rejected=[assistant("no")])
    assert texts(row.chosen) == ["user: Q?", "assistant: yes"]
    assert texts(row.rejected) == ["user: Q?", "assistant: no"]
    assert row.prompt_messages == 1


def test_without_a_prompt_it_is_the_longest_common_run_of_whole_messages() -> None:
    # A19: six messages, the first four are shared, and no message is dropped on either side.
    shared = [system(), user("1"), assistant("2"), user("3")]
    row = read(
        chosen=[*shared, assistant("the same beginning, then x"), user("4")],
        rejected=[*shared, assistant("the same beginning, then y"), user("5")],
    )
    assert row.prompt_messages == 4
    assert len(row.chosen) == len(row.rejected) == 6
    assert row.chosen[4].content == "the same beginning, then x"  # text that both share is no part of the prompt


def test_a_given_prompt_stays_the_prompt_where_the_sides_share_more() -> None:
    chosen = [assistant("a"), user("go on"), assistant("x")]
    row = read(prompt=[user()], chosen=chosen, rejected=[*chosen[:2], assistant("y")])
    assert row.prompt_messages == 1
    assert ending_turns(row.chosen, 1) == [1, 3]


def test_tools_and_tool_calls_reach_both_sides() -> None:
    # A18: the preference path reads messages as the ingest does.
    history = [user(), assistant(None, tool_calls=[call()]), result()]
    row = read(prompt=history, chosen=[assistant("x")], rejected=[assistant("y")], tools=json.dumps([TOOL]))
    assert row.tools == (TOOL,)
    for side in (row.chosen, row.rejected):
        assert side[1].content == ""
        assert side[1].tool_calls[0].arguments == '{"city": "Paris"}'
        assert side[2].tool_call_id == "c1"
        assert side[2].observation


def test_openai_rows_are_read() -> None:
    notes: Counter[str] = Counter()
    row = read_pair_row(
        {
            "input": {"messages": [user()], "tools": [TOOL], "parallel_tool_calls": True, "user": "someone"},
            "preferred_output": [assistant(None, tool_calls=[call()])],
            "non_preferred_output": [assistant("I do not know.")],
            "metadata": {},
        },
        notes,
    )
    assert row.row_format == "openai-preference"
    assert row.tools == (TOOL,)
    assert row.chosen[1].tool_calls[0].name == "weather"
    assert row.prompt_messages == 1
    assert notes == {"unread_key:input.user": 1, "unread_key:metadata": 1}


def test_names_of_a_row_are_read_and_other_keys_counted() -> None:
    notes: Counter[str] = Counter()
    row = {"id": 7, "prompt_id": "p", "group": "g", "prompt": "Q?", "chosen": "x", "rejected": "y", "score": 1.0}
    found = read_pair_row(row, notes)
    assert (found.name, found.task, found.group) == ("7", "p", "g")
    assert notes == {"unread_key:score": 1}


def test_reasoning_is_taken_out_of_text_as_everywhere() -> None:
    row = read(prompt="Q?", chosen="<think>hm</think>\nyes", rejected=assistant("no", reasoning_content="tja"))
    assert (row.chosen[1].reasoning, row.chosen[1].content) == ("hm", "yes")
    assert row.rejected[1].reasoning == "tja"


REFUSED = [
    ("identical_sides", {"chosen": [user(), assistant()], "rejected": [user(), assistant()]}),
    ("identical_sides", {"prompt": "Q?", "chosen": "x", "rejected": [assistant("x")]}),
    ("identical_sides", {"prompt": "Q?", "chosen": [assistant("x", weight=1)], "rejected": "x"}),
    ("empty_side", {"prompt": "Q?", "chosen": "", "rejected": "y"}),
    ("empty_side", {"prompt": "Q?", "chosen": "x", "rejected": []}),
    ("empty_side", {"prompt": "Q?", "chosen": None, "rejected": "y"}),
    ("empty_side", {"prompt": "Q?", "chosen": " \n", "rejected": "y"}),
    ("empty_side", {"prompt": "Q?", "chosen": assistant(None), "rejected": "y"}),
    ("empty_side", {"chosen": [user(), assistant()], "rejected": [user(), assistant(), user("2"), assistant("y")]}),
    ("no_assistant_turn", {"prompt": [user(), assistant()], "chosen": [user("2")], "rejected": [assistant("y")]}),
    ("no_trained_turn", {"prompt": "Q?", "chosen": assistant(weight=0), "rejected": "y"}),
    ("no_common_beginning", {"chosen": [user("1"), assistant()], "rejected": [user("2"), assistant()]}),
    ("no_common_beginning", {"chosen": [], "rejected": [user("2"), assistant()]}),
    (
        "no_common_beginning",
        {"chosen": [system(), user("1"), assistant()], "rejected": [system(), user("2"), assistant()]},
    ),
    ("no_prompt", {"chosen": "x", "rejected": "y"}),
    ("no_prompt", {"prompt": "", "chosen": "x", "rejected": [user(), assistant("y")]}),
    ("no_prompt", {"input": {"messages": "Q?"}, "preferred_output": "x", "non_preferred_output": "y"}),
    ("no_prompt", {"preferred_output": [assistant("x")], "non_preferred_output": [assistant("y")]}),
    ("prompt_contradicts_sides", {"prompt": "Q?", "chosen": [system(), user(), assistant()], "rejected": "y"}),
    ("prompt_contradicts_sides", {"prompt": "Q?", "chosen": [user("another"), assistant()], "rejected": "y"}),
    ("prompt_contradicts_sides", {"prompt": [system(), user()], "chosen": [user(), assistant()], "rejected": "y"}),
    (
        "prompt_contradicts_sides",
        {"prompt": [user("Q")], "chosen": [user("Q\n"), assistant()], "rejected": [user("Q\n"), assistant("y")]},
    ),
    (
        "prompt_contradicts_sides",
        {
            "prompt": [user(), assistant(tool_calls=[call(None)])],
            "chosen": [result("c1"), assistant("x")],
            "rejected": [result("c2"), assistant("y")],
        },
    ),
    ("orphan_tool_result", {"prompt": "Q?", "chosen": [result("zz"), assistant()], "rejected": "y"}),
    ("unknown_role", {"prompt": "Q?", "chosen": {"role": "robot", "content": "x"}, "rejected": "y"}),
    ("image_content", {"prompt": [user([{"type": "image_url"}])], "chosen": "x", "rejected": "y"}),
    ("bad_tools", {"prompt": "Q?", "chosen": "x", "rejected": "y", "tools": [{"name": 5}]}),
    ("bad_tool_call", {"prompt": "Q?", "chosen": assistant(tool_calls=[{"id": "c"}]), "rejected": "y"}),
    ("bad_message", {"prompt": "Q?", "chosen": ["x"], "rejected": "y"}),
    ("bad_pair", {"prompt": "Q?", "chosen": 7, "rejected": "y"}),
    ("bad_pair", {"prompt": "Q?", "chosen": "x"}),
    ("json_text", {"prompt": "Q?", "chosen": json.dumps([assistant("x")]), "rejected": "y"}),
]


@pytest.mark.parametrize(("code", "row"), REFUSED, ids=[f"{code}-{place}" for place, (code, _) in enumerate(REFUSED)])
def test_a_row_that_is_no_pair_is_refused_with_its_reason(code: str, row: dict[str, Any]) -> None:
    with pytest.raises(PairRefused) as refused:
        read(**row)
    assert refused.value.code == code
    assert refused.value.detail


def test_text_is_the_reply_alone_also_where_it_begins_as_the_prompt_which_is_counted() -> None:
    notes: Counter[str] = Counter()
    row = read_pair_row({"prompt": "Q?\nA:", "chosen": "Q?\nA: yes", "rejected": "Q?\nA: no"}, notes)
    assert texts(row.chosen) == ["user: Q?\nA:", "assistant: Q?\nA: yes"]
    assert notes == {"replies_begin_with_prompt_text": 1}
    read_pair_row({"prompt": "Hi", "chosen": "Hi you", "rejected": "no"}, notes)
    assert notes.total() == 1


def test_a_reply_that_is_json_stays_text() -> None:
    row = read(prompt="Q?", chosen="[1, 2]", rejected='{"role": "assistant"}')
    assert texts(row.chosen)[1:] == ["assistant: [1, 2]"]


def test_the_form_of_a_row_is_told_by_its_keys() -> None:
    assert row_format({"chosen": 1, "rejected": 2, "prompt": 3}) == "trl-preference"
    assert row_format({"preferred_output": 1, "non_preferred_output": 2}) == "openai-preference"
    assert row_format({"chosen": 1}) is None
    assert row_format([{"chosen": 1, "rejected": 2}]) is None


_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "robot", None])},
    optional={
        "content": st.one_of(st.none(), st.text(max_size=5), st.lists(st.text(max_size=2), max_size=2), st.integers()),
        "tool_calls": st.one_of(st.none(), st.lists(st.just({"id": "c", "function": {"name": "f"}}), max_size=2)),
        "tool_call_id": st.one_of(st.none(), st.just("c"), st.just("d")),
        "weight": st.sampled_from([0, 1, 2, None]),
    },
)
_ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
_VALUES = st.one_of(st.lists(_MESSAGE, max_size=4), _MESSAGE, _ANYTHING)
_NAMES = ["prompt", "chosen", "rejected", "tools", "id", "input", "preferred_output", "non_preferred_output", "x"]
_SIDES = st.one_of(st.text(max_size=5), st.lists(_MESSAGE, max_size=3))
_ROWS = st.one_of(
    st.dictionaries(st.sampled_from(_NAMES), _VALUES),
    st.fixed_dictionaries({"chosen": _SIDES, "rejected": _SIDES}, optional={"prompt": _SIDES, "tools": _VALUES}),
)


@settings(max_examples=400, deadline=None)
@given(_ROWS)
def test_any_row_is_a_pair_or_a_refusal(row: dict[str, Any]) -> None:
    try:
        found = read_pair_row(row, Counter())
    except PairRefused:
        return
    assert 0 < found.prompt_messages < min(len(found.chosen), len(found.rejected))
    assert ending_turns(found.chosen, found.prompt_messages)
    assert ending_turns(found.rejected, found.prompt_messages)
    assert found.chosen != found.rejected
