"""The ingest as a whole: inputs, layouts, refusals, ids, duplicates, the manifest."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from trajectory_logs import ANSWER, BUNDLED, USER, Ingested, ingested, mini_log, names, row, write_json, write_rows

from traceforge import __version__
from traceforge.errors import InputError
from traceforge.trajectories.ingest import ingest
from traceforge.trajectories.refusals import WAYS_OUT

# Inputs


def test_files_folders_and_globs_are_read_once_each_in_order(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for place in ("b/2.jsonl", "a/1.jsonl", "a/.hidden.jsonl", ".git/x.jsonl", "c/3.txt"):
        write_rows(logs / place, row(place))
    inputs = [str(logs / "c" / "3.txt"), str(logs), str(logs / "**" / "*.jsonl")]
    summary = ingest(inputs, tmp_path / "out")
    out = Ingested(summary, tmp_path / "out")
    assert [Path(each.source_file).name for each in out.trajectories] == ["3.txt", "1.jsonl", "2.jsonl"]
    assert (summary.counts.files, summary.counts.hidden, summary.counts.repeated) == (3, 2, 3)
    assert out.manifest["inputs"] == inputs


def test_a_named_hidden_file_and_a_name_with_brackets_are_read(tmp_path: Path) -> None:
    hidden, bracket = write_rows(tmp_path / ".log", row("1")), write_rows(tmp_path / "a[1].jsonl", row("2"))
    assert ingested([hidden, bracket], tmp_path / "out").summary.counts.trajectories == 2


@pytest.mark.parametrize("given", ["nothing.json", "*.json", "empty"])
def test_an_input_that_names_nothing_is_an_error_with_its_name(given: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"nothing\.json|\*\.json|empty") as caught:
        ingest([str(tmp_path / given)], tmp_path / "out")
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_link_loops_pipes_and_dead_links_are_refused_and_the_rest_is_read(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    write_rows(logs / "good.jsonl", row("1"))
    (logs / "loop").symlink_to(logs)
    (logs / "self").symlink_to(logs / "self")
    (logs / "dead").symlink_to(logs / "gone")
    os.mkfifo(logs / "pipe")
    out = ingested(logs, tmp_path / "out")
    assert out.reasons == [
        ("dead", None, "unreadable"),
        ("loop", None, "symlink_loop"),
        ("pipe", None, "not_a_file"),
        ("self", None, "symlink_loop"),
    ]
    assert out.summary.counts.trajectories == 1


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = write_rows(tmp_path / "good.jsonl", row("1")), write_rows(tmp_path / "bad.jsonl", row("2"))
    opened = Path.open

    def refusing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == bad:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    assert ingested([bad, good], tmp_path / "out").reasons == [("bad.jsonl", None, "unreadable")]


def test_the_output_of_an_earlier_ingest_is_never_its_own_input(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", row("1"))
    for _ in range(2):
        out = ingested(tmp_path, tmp_path / "out")
        assert (out.summary.counts.trajectories, out.summary.counts.files, out.reasons) == (1, 1, [])
    elsewhere = ingested([tmp_path / "out", tmp_path / "a.jsonl"], tmp_path / "other")
    assert elsewhere.reasons == [
        ("manifest.json", None, "already_ingested"),
        ("trajectories.jsonl", None, "already_ingested"),
    ]


# Layouts and refusals


def test_bad_lines_refuse_only_themselves(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        '{"messages": [{"role": "user"',
        row("1"),
        "",
        "{'messages': []}",
        '{"messages": "é"}'.encode("latin-1"),
        {"messages": []},
        {"messages": [USER]},
        {"what": 1},
        row("2"),
        '{"messages": [{"role": "us',
    )
    out = ingested(path, tmp_path / "out")
    assert out.reasons == [
        ("rows.jsonl", 1, "truncated_json"),
        ("rows.jsonl", 4, "invalid_json"),
        ("rows.jsonl", 5, "not_utf8"),
        ("rows.jsonl", 6, "no_messages"),
        ("rows.jsonl", 7, "no_assistant_turn"),
        ("rows.jsonl", 8, "unknown_format"),
        ("rows.jsonl", 10, "truncated_json"),
    ]
    assert [each.trajectory_id for each in out.trajectories] == ["rows:2", "rows:9"]
    assert out.manifest["refusals_by_reason"]["truncated_json"] == 2
    assert out.manifest["counts"]["refused"] == 7
    assert set(out.manifest["ways_out"]) == set(out.manifest["refusals_by_reason"])


def test_whole_files_are_refused_with_their_reason(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    write_json(logs / "good.json", row("1"))
    text = json.dumps(mini_log([ANSWER]), indent=2)
    held = {
        "empty.json": b"",
        "blank.json": b" \n\n ",
        "cut.json": text[:200].encode(),
        "cut_line.json": json.dumps(mini_log([ANSWER]))[:-5].encode(),
        "wrong.json": text.replace(":", "=", 1).encode(),
        "latin1.json": text.replace("bash", "bäsh").encode("latin-1"),
        "utf16.json": text.encode("utf-16"),
        "zip.json": b"PK\x03\x04 rest",
        "binary.json": bytes(range(256)),
        "noise.json": b"\x01\x02\xff\xfe\n\x03",
        "readme.md": b"# Logs\n\nAll of them.\n",
        "csv.txt": "a;b\né;1\n".encode("latin-1"),
        "number.json": b"3",
        "object.json": b'{"a": 1}',
        "list.json": b"[]",
        "session.jsonl": b'{"type": "user"}\n' * 500,
    }
    for name, content in held.items():
        (logs / name).write_bytes(content)
    out = ingested(logs, tmp_path / "out")
    assert {name: reason for name, line, reason in out.reasons if line is None} == {
        "empty.json": "empty_file",
        "blank.json": "empty_file",
        "cut.json": "truncated_json",
        "cut_line.json": "truncated_json",
        "wrong.json": "invalid_json",
        "latin1.json": "not_utf8",
        "utf16.json": "not_utf8",
        "zip.json": "binary_file",
        "binary.json": "binary_file",
        "noise.json": "binary_file",
        "readme.md": "unknown_format",
        "csv.txt": "not_utf8",
        "number.json": "unknown_format",
        "object.json": "unknown_format",
        "list.json": "unknown_format",
        "session.jsonl": "unknown_format",
    }
    assert len(out.reasons) == len(held), "a file of unknown lines is refused once"
    hashes = {Path(each["path"]).name: each["sha256"] for each in out.manifest["files"]}
    assert hashes == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in logs.iterdir()}


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    lines = b"\r\n".join(json.dumps(row(text)).encode() for text in ("1", "2"))
    (logs / "lines.jsonl").write_bytes(b"\xef\xbb\xbf" + lines + b"\r\n")
    (logs / "document.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(row("3"), indent=1).encode())
    out = ingested(logs, tmp_path / "out")
    assert (out.summary.counts.trajectories, out.reasons) == (3, [])


def test_an_odd_first_line_does_not_hide_the_rows_after_it(tmp_path: Path) -> None:
    for number, first in enumerate(("# exported today", '{"type": "header"}', "[", "}", ' {"a":')):
        path = write_rows(tmp_path / f"{number}.jsonl", first, row("1"), row("2"))
        out = ingested(path, tmp_path / f"out{number}")
        assert out.summary.counts.trajectories == 2
        assert [line for _, line, _ in out.reasons] == [1]


def test_nested_and_unusual_json_is_read_or_refused(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        row("1"),
        '{"messages": ' + "[" * 2000 + "]" * 2000 + "}",
        json.dumps(row("2", cost=float("nan"))),
        json.dumps(row("3")).replace("Why?", r"\ud83d!"),
        json.dumps(row("4", tools=[{"name": "f", "parameters": nested(900)}])),
    )
    out = ingested(path, tmp_path / "out")
    assert out.reasons[0] == ("rows.jsonl", 2, "too_deeply_nested")
    assert {reason for _, _, reason in out.reasons} == {"too_deeply_nested"}
    assert out.trajectories[2].messages[0].content == "�!"
    assert out.manifest["notes"] == {"unread_key:cost": 1, "replaced_surrogates": 1}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_long_list_of_refusals_is_counted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceforge.trajectories.ingest._NUM_REFUSALS_LISTED", 3)
    path = write_rows(tmp_path / "rows.jsonl", row("1"), *["{" for _ in range(8)])
    manifest = ingested(path, tmp_path / "out").manifest
    assert (len(manifest["refusals"]), manifest["refusals_not_listed"], manifest["counts"]["refused"]) == (3, 5, 8)


def test_when_nothing_is_usable_the_error_lists_the_reasons_and_nothing_is_written(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"messages": [USER]}, *["{" for _ in range(15)])
    with pytest.raises(InputError) as caught:
        ingest([str(path)], tmp_path / "deep" / "out")
    message = str(caught.value)
    assert "15 truncated_json" in message
    assert "rows.jsonl:1: no_assistant_turn" in message
    assert "and 6 more" in message
    assert message.count("rows.jsonl:") == 10
    assert names(tmp_path) == ["rows.jsonl"]


def test_a_failed_ingest_leaves_the_earlier_one_as_it_was(tmp_path: Path) -> None:
    good, bad = write_rows(tmp_path / "good.jsonl", row("1")), write_rows(tmp_path / "bad.jsonl", "{")
    ingest([str(good)], tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(InputError):
        ingest([str(bad)], tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


# Ids and duplicates


def test_ids_never_collide_and_stay_the_same_from_run_to_run(tmp_path: Path) -> None:
    wanted = ["a", "a", "a~2", "a", "b#1|c", "b_1_c", "  ", "x\ny", "z", "z~2", "z"]
    rows = [row(str(number), id=each) for number, each in enumerate(wanted)]
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    first = [each.trajectory_id for each in ingested(path, tmp_path / "1").trajectories]
    assert first == ["a", "a~2", "a~2~2", "a~3", "b_1_c", "b_1_c~2", "trajectory", "x_y", "z", "z~2", "z~3"]
    assert [each.trajectory_id for each in ingested(path, tmp_path / "2").trajectories] == first


def test_the_same_name_in_two_folders_gives_two_ids(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write_rows(tmp_path / "logs" / folder / "run.jsonl", row(folder))
    ids = [each.trajectory_id for each in ingested(tmp_path / "logs", tmp_path / "out").trajectories]
    assert ids == ["run:1", "run:1~2"]


def test_a_copy_is_refused_and_names_the_first_one(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [row("1", id="first"), row("1", id="second"), row("1", id="third", tools=tools), row("1 ", id="fourth")]
    out = ingested(write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "out")
    assert [each.trajectory_id for each in out.trajectories] == ["first", "third", "fourth"]
    assert out.reasons == [("rows.jsonl", 2, "duplicate")]
    assert "'first'" in out.details()


# The manifest


def test_the_manifest_adds_up(tmp_path: Path) -> None:
    out = ingested(BUNDLED, tmp_path / "out")
    manifest = out.manifest
    assert manifest["schema_version"] == "traceforge-ingest/1"
    assert manifest["traceforge"] == __version__
    assert manifest["created"].endswith("+00:00")
    counts = manifest["counts"]
    assert counts["trajectories"] == 15
    assert counts["turns"] == 20 + 2 + 10 + 5 + 10 + 10
    assert counts["turns"] == sum(len(each.turns()) for each in out.trajectories)
    assert counts["messages"] == sum(len(each.messages) for each in out.trajectories)
    assert counts["with_reasoning"] == sum(m.reasoning is not None for each in out.trajectories for m in each.messages)
    assert (counts["resolved"], counts["unresolved"], counts["unlabelled"]) == (0, 0, 15)
    assert counts["side_files"] == 3
    assert manifest["formats"] == {"openai-messages": 10, "mini-swe-agent-v1": 3, "mini-swe-agent-v2": 2}
    assert sum(each["trajectories"] for each in manifest["files"]) == 15
    assert {Path(each["path"]).name: each["format"] for each in manifest["files"] if "report" in each["path"]} == {
        "astropy__astropy-12907.report.json": "swe-bench-labels",
        "django__django-10973.report.json": "swe-bench-labels",
        "scikit-learn__scikit-learn-14141.report.json": "swe-bench-labels",
    }
    written = (tmp_path / "out" / "trajectories.jsonl").read_bytes()
    assert manifest["outputs"] == {
        "trajectories.jsonl": {"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
    }
    assert out.reasons == [("SOURCES.md", None, "unknown_format")]
    assert json.loads(out.summary.to_json()) == out.summary.as_dict()


def test_predictions_beside_the_logs_are_named_and_not_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "logs" / "run.traj.json", mini_log([ANSWER]))
    write_json(tmp_path / "logs" / "preds.json", {"a__b-1": {"instance_id": "a__b-1", "model_patch": "diff"}})
    rollout = {"instance_id": "a__b-1", "model_patch": "diff", "rollout": []}
    write_json(tmp_path / "logs" / "rollout.json", rollout)
    out = ingested(tmp_path / "logs", tmp_path / "out")
    assert (out.summary.counts.side_files, out.reasons) == (1, [("rollout.json", None, "unknown_format")])


def test_every_reason_has_a_way_out() -> None:
    assert all(way and not way.endswith(".") for way in WAYS_OUT.values())
