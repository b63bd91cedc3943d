"""Pairs named over an ingest folder: runs, turns, and replies given in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dataset_stubs import assistant, run_of, trajectory, user, write_trajectories

from traceforge.errors import InputError
from traceforge.samples.pair_build import PairBuildSummary, build_pairs
from traceforge.samples.pair_references import PairReference, open_pairs
from traceforge.samples.pair_sides import ending_turns
from traceforge.trajectories.record import Message, ToolCall, Trajectory


def runs() -> list[Trajectory]:
    """Return two runs that share a task and the first answered turn, and one of another task."""
    shared = [user("task"), assistant("look"), user("seen")]
    return [
        trajectory("a", *shared, assistant("fix"), user("done"), assistant("submit"), task="t"),
        trajectory("b", *shared, assistant("give up"), task="t"),
        run_of("other", 2),
    ]


def ingested(tmp_path: Path, *more: Trajectory) -> Path:
    return write_trajectories(tmp_path / "ingested", *runs(), *more)


def build(tmp_path: Path, *explicit: str, more: tuple[Trajectory, ...] = ()) -> PairBuildSummary:
    return build_pairs(ingested(tmp_path, *more), tmp_path / "out", explicit=explicit)


def references(tmp_path: Path) -> tuple[PairReference, ...]:
    return open_pairs(tmp_path / "out").references


def pairs_file(tmp_path: Path, *rows: Any) -> str:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def test_two_runs_fork_behind_their_longest_common_run_of_messages(tmp_path: Path) -> None:
    summary = build(tmp_path, "a|b")
    (reference,) = references(tmp_path)
    assert (reference.pair_id, reference.prompt_messages) == ("a|b", 3)
    assert (reference.chosen_messages, reference.rejected_messages) == (6, 4)
    assert (reference.task_id, reference.group) == ("t", "a")
    chosen, rejected = open_pairs(tmp_path / "out").sides(reference)
    assert ending_turns(chosen.messages, 3) == [3, 5]
    assert ending_turns(rejected.messages, 3) == [3]
    assert (summary.pairs, summary.trajectories) == (1, 2)


def test_two_turns_behind_one_history_are_a_pair_of_one_turn_each(tmp_path: Path) -> None:
    build(tmp_path, "a#1|b#1")
    (reference,) = references(tmp_path)
    assert (reference.pair_id, reference.prompt_messages) == ("a#1|b#1", 3)
    assert (reference.chosen_messages, reference.rejected_messages) == (4, 4)  # the rest of run a is no part of it


def test_runs_are_copied_once_however_many_pairs_name_them(tmp_path: Path) -> None:
    fork = trajectory("c", *runs()[1].messages[:3], assistant("guess"), task="t")
    summary = build(tmp_path, "a|b", "a|c", "a#1|c#1", more=(fork,))
    assert (summary.pairs, summary.trajectories, summary.groups) == (3, 3, 1)
    original = (tmp_path / "ingested/trajectories.jsonl").read_bytes().splitlines()
    assert sorted((tmp_path / "out/trajectories.jsonl").read_bytes().splitlines()) == sorted(
        [original[0], original[1], original[3]]
    )


def test_a_reply_given_in_full_stands_behind_the_history_of_the_turn(tmp_path: Path) -> None:
    reply = [
        {"role": "assistant", "content": "look"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "x"},
    ]
    rows = [
        {"chosen": "a#1", "rejected": {"role": "assistant", "content": "give up"}, "note": "for people", "x": 1},
        {"chosen": reply, "rejected": "a#1", "task_id": "named"},
    ]
    summary = build(tmp_path, pairs_file(tmp_path, *rows))
    first, second = references(tmp_path)
    assert (first.pair_id, first.prompt_messages, first.group, first.task_id) == ("a#1|pairs:1", 3, "a", "t")
    assert (second.pair_id, second.rejected_messages, second.chosen_messages) == ("pairs:2|a#1", 4, 6)
    made = open_pairs(tmp_path / "out").sides(first)[1]
    assert [message.content for message in made.messages] == ["task", "look", "seen", "give up"]
    assert (made.source_format, made.outcome.resolved, made.exit_status) == ("explicit-pair", None, None)
    assert summary.notes == {"unread_key:x": 1, "tasks_joined": 1}


def test_observations_keep_their_mark_so_both_sides_are_shortened_alike(tmp_path: Path) -> None:
    run = trajectory(
        "r", user("task"), assistant("a"), Message(role="user", content="long", observation=True), assistant("b")
    )
    row = {"chosen": "r#1", "rejected": {"role": "assistant", "content": "c"}}
    build(tmp_path, pairs_file(tmp_path, row), more=(run,))
    sides = open_pairs(tmp_path / "out").sides(references(tmp_path)[0])
    assert [side.messages[2].observation for side in sides] == [True, True]


def test_an_id_that_looks_like_a_made_one_is_not_taken_twice(tmp_path: Path) -> None:
    row = {"chosen": "a#1", "rejected": {"role": "assistant", "content": "x"}}
    build(tmp_path, pairs_file(tmp_path, row), more=(run_of("pairs:1", 1),))
    assert references(tmp_path)[0].pair_id == "a#1|pairs:1~2"


def _with_tools(name: str) -> Trajectory:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    other = trajectory(name, *runs()[1].messages, task="t")
    return Trajectory(**{field: getattr(other, field) for field in Trajectory.__struct_fields__} | {"tools": (tool,)})


REFUSED = [
    ("identical_sides", "a|a"),
    ("identical_sides", "a#1|a#1"),
    ("no_common_beginning", "a|other"),
    ("no_common_beginning", {"chosen": "starts#0", "rejected": {"role": "assistant", "content": "x"}}),
    ("empty_side", "a|prefix"),
    ("histories_differ", "a#1|a#2"),
    ("histories_differ", "a#1|other#1"),
    ("tools_differ", "a|tools"),
    ("no_trained_turn", {"chosen": "a#1", "rejected": {"role": "assistant", "content": "x", "weight": 0}}),
    ("empty_side", {"chosen": "a#1", "rejected": []}),
    ("unknown_trajectory", "a|missing"),
    ("unknown_trajectory", "a#1|missing#1"),
    ("unknown_turn", "a#3|b#1"),
    ("unknown_turn", "a#999999999|b#1"),
    ("bad_pair", "a|b#1"),
    ("bad_pair", {"chosen": "a", "rejected": {"role": "assistant", "content": "x"}}),
    ("bad_pair", {"chosen": [], "rejected": []}),
    ("bad_pair", {"chosen": "a#1", "rejected": 5}),
    ("bad_pair", {"chosen": "a#1"}),
    ("bad_pair", "[1]"),
    ("unknown_role", {"chosen": "a#1", "rejected": {"role": "robot"}}),
    ("orphan_tool_result", {"chosen": "a#1", "rejected": [{"role": "tool", "tool_call_id": "z", "content": "x"}]}),
    ("invalid_json", "{nothing"),
]


@pytest.mark.parametrize(("code", "pair"), REFUSED, ids=[f"{code}-{place}" for place, (code, _) in enumerate(REFUSED)])
def test_what_is_no_pair_is_refused_and_the_next_one_kept(tmp_path: Path, code: str, pair: Any) -> None:
    more = (
        trajectory("prefix", *runs()[0].messages[:4]),
        trajectory("starts", assistant("first")),
        _with_tools("tools"),
    )
    good = {"chosen": "a", "rejected": "b"}
    by_id = isinstance(pair, str) and "|" in pair
    given = [pair, "a|b"] if by_id else [pairs_file(tmp_path, good, pair)]
    summary = build(tmp_path, *given, more=more)
    assert summary.refusals == {code: 1}
    assert summary.pairs == 1
    place = summary.first_refused[code].place
    assert place == pair if by_id else place.startswith("pairs.jsonl:2")


def test_a_misspelt_id_is_guessed(tmp_path: Path) -> None:
    summary = build(tmp_path, "a|b", "a|othr")
    assert "did you mean 'other'?" in summary.first_refused["unknown_trajectory"].detail


def test_a_call_in_the_history_keeps_its_lack_of_an_id_on_both_sides(tmp_path: Path) -> None:
    # Pairing a result with a call of the history would give that call an id, and so another prompt to one side.
    call = Message(role="assistant", content="", tool_calls=(ToolCall("f", "{}"),))
    run = trajectory("r", user("task"), call, user("?"), assistant("x"))
    reply = [{"role": "tool", "tool_call_id": "z", "content": "late"}, {"role": "assistant", "content": "y"}]
    build(tmp_path, pairs_file(tmp_path, {"chosen": "r#1", "rejected": reply}), more=(run,))
    chosen, rejected = open_pairs(tmp_path / "out").sides(references(tmp_path)[0])
    assert chosen.messages[:3] == rejected.messages[:3]


def test_what_is_neither_a_file_nor_two_ids_is_an_error(tmp_path: Path) -> None:
    for given in ("a", "a|", "a|b|c", "missing.jsonl"):
        with pytest.raises(InputError, match="no such file, and no pair of ids"):
            build(tmp_path, given)
    with pytest.raises(InputError, match="explicit pairs name trajectories of an ingest folder"):
        build_pairs(tmp_path / "nowhere", tmp_path / "out", explicit=["a|b"])
    with pytest.raises(InputError, match="two trajectories have the id 'a'"):
        build(tmp_path, "a|b", more=(run_of("a", 1),))


def test_an_ingest_folder_that_was_changed_is_refused(tmp_path: Path) -> None:
    folder = ingested(tmp_path)
    manifest = {"schema_version": "traceforge-ingest/1", "outputs": {"trajectories.jsonl": {"sha256": "0" * 64}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="the file was changed after it was ingested"):
        build_pairs(folder, tmp_path / "out", explicit=["a|b"])
    assert build_pairs(folder / "trajectories.jsonl", tmp_path / "out", explicit=["a|b"]).pairs == 1
