"""`build pairs`: files, references, refusals with their lines, tasks and groups."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traceforge import folders
from traceforge.errors import InputError, StorageError
from traceforge.samples.pair_build import build_pairs
from traceforge.samples.pair_references import PairFolder, open_pairs
from traceforge.trajectories.record import read_trajectories

DATA = Path(__file__).parents[2] / "data" / "pairs"
GOOD = {"prompt": "Say yes.", "chosen": "Yes.", "rejected": "No."}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def manifest_of(folder: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return held


def shown(folder: PairFolder) -> list[Any]:
    """Return the sides of every pair; arguments are compared as what they say, not as they are spaced."""
    return [
        (
            message.role,
            message.content,
            [(call.name, json.loads(call.arguments)) for call in message.tool_calls],
            side.tools,
        )
        for reference in folder.references
        for side in folder.sides(reference)
        for message in side.messages
    ]


def test_rows_become_two_records_and_one_reference_each(tmp_path: Path) -> None:
    summary = build_pairs(DATA / "trl.jsonl", tmp_path / "out")
    assert (summary.rows, summary.pairs, summary.trajectories, summary.refusals) == (4, 4, 8, {})
    folder = open_pairs(tmp_path / "out")
    first, second, *_ = folder.references
    assert first.pair_id == "six.chosen|six.rejected"
    assert (first.prompt_messages, first.chosen_messages, first.rejected_messages) == (4, 5, 5)
    assert (first.task_id, first.group) == ("pairs-of-two-turns", "six.chosen|six.rejected")
    assert second.pair_id == "trl:2.chosen|trl:2.rejected"
    assert (second.prompt_messages, second.chosen_messages, second.rejected_messages) == (4, 5, 7)
    chosen, rejected = folder.sides(second)
    assert chosen.tools == rejected.tools != ()
    assert [message.role for message in rejected.messages[4:]] == ["assistant", "tool", "assistant"]
    assert chosen.source_format == "trl-preference"
    digest = hashlib.sha256((DATA / "trl.jsonl").read_bytes()).hexdigest()
    assert manifest_of(tmp_path / "out")["inputs"] == [{"file": "trl.jsonl", "sha256": digest}]
    assert summary.notes == {"unread_key:score_chosen": 1}


def test_openai_rows_are_built(tmp_path: Path) -> None:
    build_pairs(DATA / "openai.jsonl", tmp_path / "out")
    chosen, rejected = open_pairs(tmp_path / "out").sides(open_pairs(tmp_path / "out").references[0])
    assert chosen.messages[1].tool_calls[0].name == "weather"
    assert rejected.messages[1].content == "I do not know."
    assert chosen.source_format == "openai-preference"


def test_every_row_that_is_no_pair_is_counted_with_its_line(tmp_path: Path) -> None:
    summary = build_pairs(DATA / "hostile.jsonl", tmp_path / "out")
    expected = {
        2: "truncated_json",
        3: "identical_sides",
        4: "empty_side",
        5: "prompt_contradicts_sides",
        6: "no_common_beginning",
        7: "no_common_beginning",
        8: "no_prompt",
        9: "unknown_role",
        10: "orphan_tool_result",
        11: "image_content",
        12: "empty_side",
        13: "no_trained_turn",
        14: "bad_tools",
        15: "duplicate",
        17: "bad_pair",
        18: "json_text",
        19: "prompt_contradicts_sides",
        20: "empty_side",
        21: "bad_pair",
        22: "no_prompt",
    }
    found = {refused["place"]: refused["reason"] for refused in manifest_of(tmp_path / "out")["refused_rows"]}
    lists = {f"hostile.jsonl:16: item {number}": "bad_pair" for number in (1, 2)}
    assert found == {f"hostile.jsonl:{line}": code for line, code in expected.items()} | lists
    assert summary.pairs == 1
    assert summary.pairs + sum(summary.refusals.values()) == summary.rows == 23
    assert summary.first_refused["empty_side"].place == "hostile.jsonl:4"
    assert set(manifest_of(tmp_path / "out")["ways_out"]) == set(summary.refusals)
    assert "hostile.jsonl:2" in summary.describe()


def test_pairs_of_one_prompt_are_one_task(tmp_path: Path) -> None:
    rows = [
        {**GOOD, "id": "a"},
        {"prompt": "Say no.", "chosen": "No.", "rejected": "Yes."},
        {**GOOD, "rejected": "Maybe.", "task_id": "t2"},
        {**GOOD, "rejected": "Never.", "task_id": "t1"},
        {"prompt": "Say t1.", "chosen": "t1", "rejected": "?", "task_id": "t1"},
    ]
    summary = build_pairs(write(tmp_path / "rows.jsonl", *rows), tmp_path / "out")
    # The first, third and fourth share a prompt; the fifth is of the task that the fourth names.
    tasks = [reference.task_id for reference in open_pairs(tmp_path / "out").references]
    assert tasks == ["a", "rows:2", "a", "a", "a"]
    assert summary.tasks == 2
    assert summary.notes == {"tasks_joined": 1}  # t2 and t1; the first row only has a name of its own


def test_the_same_tools_are_part_of_a_prompt(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    build_pairs(write(tmp_path / "rows.jsonl", GOOD, {**GOOD, "tools": [tool]}), tmp_path / "out")
    assert len({reference.task_id for reference in open_pairs(tmp_path / "out").references}) == 2


def test_ids_are_unique_and_hold_no_separator(tmp_path: Path) -> None:
    rows = [{**GOOD, "id": "x|1#2"}, {**GOOD, "id": "x|1#2", "rejected": "Never."}]
    build_pairs(write(tmp_path / "rows.jsonl", *rows), tmp_path / "out")
    references = open_pairs(tmp_path / "out").references
    assert [reference.pair_id for reference in references] == [
        "x_1_2.chosen|x_1_2.rejected",
        "x_1_2.chosen~2|x_1_2.rejected~2",
    ]


def test_a_stated_group_is_kept(tmp_path: Path) -> None:
    rows = [{**GOOD, "group": "run"}, {**GOOD, "rejected": "?", "trajectory_id": "run"}, {**GOOD, "rejected": "!"}]
    summary = build_pairs(write(tmp_path / "rows.jsonl", *rows), tmp_path / "out")
    groups = [reference.group for reference in open_pairs(tmp_path / "out").references]
    assert groups == ["run", "run", "rows:3.chosen|rows:3.rejected"]
    assert summary.groups == 2


def test_turns_that_are_not_trained_are_noted(tmp_path: Path) -> None:
    ending = [
        {"role": "assistant", "content": "x", "weight": 0},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "y"},
    ]
    summary = build_pairs(write(tmp_path / "rows.jsonl", {**GOOD, "chosen": ending}), tmp_path / "out")
    assert summary.notes == {"turns_empty": 1, "turns_flagged_untrained": 1}


def test_one_list_of_rows_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD, {**GOOD, "chosen": 5}, {**GOOD, "rejected": "Never."}], indent=1))
    summary = build_pairs(path, tmp_path / "out")
    assert (summary.pairs, summary.first_refused["bad_pair"].place) == (2, "rows.json: item 2")


def test_the_same_rows_give_the_same_bytes_wherever_they_lie(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trl.jsonl").write_bytes((DATA / "trl.jsonl").read_bytes())
        build_pairs(tmp_path / name / "trl.jsonl", tmp_path / name / "out")
    for file in ("trajectories.jsonl", "pairs.jsonl", "manifest.json"):
        assert (tmp_path / "one/out" / file).read_bytes() == (tmp_path / "two/out" / file).read_bytes()


def test_standard_rows_that_are_asked_for_build_the_same_pairs_again(tmp_path: Path) -> None:
    summary = build_pairs(DATA / "trl.jsonl", tmp_path / "out", as_trl=True)
    assert summary.trl_rows == 4
    again = build_pairs(tmp_path / "out/trl.jsonl", tmp_path / "again")
    assert again.pairs == 4
    sides = [shown(open_pairs(folder)) for folder in (tmp_path / "out", tmp_path / "again")]
    assert sides[0] == sides[1]
    build_pairs(DATA / "trl.jsonl", tmp_path / "out")
    assert not (tmp_path / "out/trl.jsonl").exists()


def test_arguments_that_are_no_json_have_no_standard_row(tmp_path: Path) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "not json"}}
    rows = [{**GOOD, "chosen": {"role": "assistant", "tool_calls": [call]}}, {**GOOD, "chosen": "x"}]
    summary = build_pairs(write(tmp_path / "rows.jsonl", *rows), tmp_path / "out", as_trl=True)
    assert (summary.pairs, summary.trl_rows, summary.trl_refusals) == (2, 1, {"arguments_not_json": 1})


def test_a_lone_surrogate_becomes_the_replacement_character_and_is_noted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", '{"prompt": "a\\ud83d", "chosen": "x", "rejected": "y"}')
    summary = build_pairs(path, tmp_path / "out")
    (record, _) = read_trajectories(tmp_path / "out/trajectories.jsonl")
    assert record.messages[0].content == "a\ufffd"
    assert summary.notes == {"replaced_surrogates": 1}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "empty_file"),
        ([{"messages": []}, {"messages": []}], "unknown_format"),
        (["no json", "at all"], "unknown_format"),
        ([{**GOOD, "chosen": "No."}], r"no pair is left of 1; refused: identical_sides 1 \(first: rows.jsonl:1: both"),
        (["[]"], "holds no pair"),
    ],
)
def test_a_file_without_a_pair_is_an_error_and_leaves_nothing(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        build_pairs(write(tmp_path / "rows.jsonl", *rows), tmp_path / "out")
    assert "rows.jsonl" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_source_or_an_output_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", GOOD)
    with pytest.raises(InputError, match="which of its trajectories are pairs must be said"):
        build_pairs(tmp_path, tmp_path / "out")
    with pytest.raises(InputError, match=r"missing\.jsonl: cannot read rows"):
        build_pairs(tmp_path / "missing.jsonl", tmp_path / "out")
    with pytest.raises(InputError, match="is a file"):
        build_pairs(rows, rows)
    with pytest.raises(InputError, match="output and source are the same folder"):
        build_pairs(rows, tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/manifest.json").write_text('{"schema_version": "traceforge-sft/1"}')
    with pytest.raises(InputError, match="holds something else than a build"):
        build_pairs(rows, tmp_path / "other")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        build_pairs(DATA / "trl.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_was_changed_is_refused(tmp_path: Path) -> None:
    build_pairs(DATA / "trl.jsonl", tmp_path / "out")
    pairs = tmp_path / "out/pairs.jsonl"
    pairs.write_bytes(pairs.read_bytes().replace(b'"prompt_messages":4', b'"prompt_messages":3'))
    with pytest.raises(InputError, match="the file was changed or its build was interrupted"):
        open_pairs(tmp_path / "out")


def _forged(tmp_path: Path, *changes: tuple[bytes, bytes], name: str = "pairs.jsonl") -> Path:
    """Return a folder with one of its files changed, manifest included."""
    out = tmp_path / "forged"
    build_pairs(write(tmp_path / "rows.jsonl", {**GOOD, "id": "p"}), out)
    contents = {file: (out / file).read_bytes() for file in ("trajectories.jsonl", "pairs.jsonl")}
    for before, after in changes:
        assert before in contents[name]
        contents[name] = contents[name].replace(before, after, 1)
    with folders.FolderWriter(out) as writer:
        for file, content in contents.items():
            writer.file(file).write(content)
        writer.commit({"schema_version": "traceforge-pairs/1"})
    return out


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b'"chosen":"p.chosen"', b'"chosen":"q"', "trajectory 'q' of p.chosen|p.rejected is not in"),
        (b'"prompt_messages":1', b'"prompt_messages":2', "names messages that its trajectories do not have"),
        (b'"prompt_messages":1', b'"prompt_messages":0', "names messages that its trajectories do not have"),
        (b'"chosen_messages":2', b'"chosen_messages":3', "names messages that its trajectories do not have"),
    ],
)
def test_a_reference_to_nothing_is_named(tmp_path: Path, before: bytes, after: bytes, message: str) -> None:
    folder = open_pairs(_forged(tmp_path, (before, after)))
    with pytest.raises(InputError, match=message.replace("|", r"\|")):
        folder.sides(folder.references[0])


@pytest.mark.parametrize("change", [(b'"Say yes."', b'"Say no."'), (b'"tools":[]', b'"tools":[{"type":"function"}]')])
def test_sides_that_do_not_share_the_prompt_are_named(tmp_path: Path, change: tuple[bytes, bytes]) -> None:
    folder = open_pairs(_forged(tmp_path, change, name="trajectories.jsonl"))
    with pytest.raises(InputError, match="do not share its prompt"):
        folder.sides(folder.references[0])


def test_a_line_that_is_no_reference_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pairs\.jsonl:1: not a pair reference"):
        open_pairs(_forged(tmp_path, (b'"group"', b'"gruppe"')))


def test_folders_of_another_kind_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "sft.jsonl").touch()
    with pytest.raises(InputError, match="it holds samples, not preference pairs"):
        open_pairs(tmp_path)
    (tmp_path / "sft.jsonl").rename(tmp_path / "trajectories.jsonl")
    with pytest.raises(InputError, match="it holds ingested trajectories, not pairs"):
        open_pairs(tmp_path)


_LINES = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from([line.encode() for line in (DATA / "hostile.jsonl").read_text().splitlines()]),
        st.sampled_from([line.encode() for line in (DATA / "trl.jsonl").read_text().splitlines()]),
    ),
    max_size=6,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_LINES)
def test_any_file_is_built_or_refused_by_name(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        summary = build_pairs(path, tmp_path / "any")
    except InputError:
        return
    assert summary.pairs + sum(summary.refusals.values()) == summary.rows
    folder = open_pairs(tmp_path / "any")
    assert len(folder.references) == summary.pairs
    assert all(folder.sides(reference) for reference in folder.references)
