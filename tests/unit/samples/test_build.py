"""`build sft`: references, refusals by reason, hashes, and nothing half-written."""

from __future__ import annotations

import errno
import hashlib
import json
import tracemalloc

import msgspec
import pytest
from tests.dataset_stubs import assistant, run_of, trajectory, user, write_trajectories

from traceforge import folders
from traceforge.errors import InputError, StorageError
from traceforge.samples.build import build_sft
from traceforge.samples.references import open_built
from traceforge.trajectories.record import Message, ToolCall


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_trained_turn_is_one_reference(tmp_path) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 2, task="t"), run_of("b", 1))
    summary = build_sft(source, tmp_path / "out")
    assert lines(tmp_path / "out/sft.jsonl") == [
        {"sample_id": "a#0", "trajectory_id": "a", "task_id": "t", "turn": 0, "message_index": 1},
        {"sample_id": "a#1", "trajectory_id": "a", "task_id": "t", "turn": 1, "message_index": 3},
        {"sample_id": "b#0", "trajectory_id": "b", "task_id": "b", "turn": 0, "message_index": 1},
    ]
    assert (summary.samples, summary.turns, summary.trajectories, summary.tasks) == (3, 3, 2, 2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "sft.jsonl",
        "trajectories.jsonl",
    ]


def test_the_manifest_vouches_for_inputs_and_outputs(tmp_path) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 2))
    (source / "manifest.json").write_text('{"schema": "ingest"}')
    build_sft(source, tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["schema_version"] == "traceforge-sft/1"
    assert manifest["inputs"] == [
        {"file": "trajectories.jsonl", "sha256": sha256(source / "trajectories.jsonl")},
        {"file": "manifest.json", "sha256": sha256(source / "manifest.json")},
    ]
    for name in ("trajectories.jsonl", "sft.jsonl"):
        path = tmp_path / "out" / name
        assert manifest["outputs"][name] == {"sha256": sha256(path), "bytes": path.stat().st_size}
    assert sha256(tmp_path / "out/trajectories.jsonl") == sha256(source / "trajectories.jsonl")


def test_two_builds_of_one_source_are_the_same_bytes(tmp_path) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 2), run_of("b", 3))
    build_sft(source, tmp_path / "one", as_trl=True)
    build_sft(source / "trajectories.jsonl", tmp_path / "two", as_trl=True)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_turns_flagged_untrained_and_empty_turns_are_refused_with_their_ids(tmp_path) -> None:
    call = ToolCall(name="bash", arguments="{}")
    source = write_trajectories(
        tmp_path / "in",
        trajectory(
            "a",
            user("go"),
            assistant("one", trained=False),
            assistant("  \n"),
            assistant("", tool_calls=(call,)),
            assistant("", reasoning="hm"),
            assistant("two", tool_calls=(call,), trained=False),
            assistant("last", trained=True),
        ),
        trajectory("b", user("nobody answered")),
    )
    summary = build_sft(source, tmp_path / "out")
    assert [line["sample_id"] for line in lines(tmp_path / "out/sft.jsonl")] == ["a#2", "a#3", "a#5"]
    refusals = json.loads((tmp_path / "out/manifest.json").read_text())["refusals"]
    assert refusals == {
        "empty_turn": {"unit": "turn", "count": 1, "turns": 1, "ids": ["a#1"]},
        "flagged_untrained": {"unit": "turn", "count": 2, "turns": 2, "ids": ["a#0", "a#4"]},
        "no_assistant_turn": {"unit": "trajectory", "count": 1, "turns": 0, "ids": ["b"]},
    }
    assert msgspec.to_builtins(summary.refusals) == refusals
    assert summary.turns == summary.samples + sum(refused.turns for refused in summary.refusals.values())


def test_only_resolved_tells_unresolved_from_unknown(tmp_path) -> None:
    runs = [
        trajectory("yes", user("go"), assistant("one"), resolved=True),
        trajectory("no", user("go"), assistant("one"), assistant("two"), resolved=False),
        trajectory("unknown", user("go"), assistant("one")),
    ]
    summary = build_sft(write_trajectories(tmp_path / "in", *runs), tmp_path / "out", only_resolved=True)
    assert [line["sample_id"] for line in lines(tmp_path / "out/sft.jsonl")] == ["yes#0"]
    assert summary.refusals["not_resolved"].ids == ["no"]
    assert summary.refusals["not_resolved"].turns == 2
    assert summary.refusals["outcome_unknown"].ids == ["unknown"]
    assert build_sft(tmp_path / "in", tmp_path / "all").samples == 4


def test_when_nothing_is_left_the_error_counts_and_no_folder_appears(tmp_path) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 3), run_of("b", 2))
    with pytest.raises(InputError, match="2 trajectories with 5 assistant turns; refused: outcome_unknown 2") as caught:
        build_sft(source, tmp_path / "deep/out", only_resolved=True)
    assert "--labels" in caught.value.hint
    assert not (tmp_path / "deep").exists()
    with pytest.raises(InputError, match="holds no trajectory"):
        build_sft(write_trajectories(tmp_path / "empty"), tmp_path / "out")


def test_a_failed_build_leaves_the_earlier_one_untouched(tmp_path) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 3))
    build_sft(source, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with (source / "trajectories.jsonl").open("ab") as handle:
        handle.write(b'{"trajectory_id": "half')
    with pytest.raises(InputError, match=r"trajectories\.jsonl:2: not a trajectory record"):
        build_sft(source, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 3))

    def full(self, chunk):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders.HashedFile, "write", full)
    with pytest.raises(StorageError, match=r"out: cannot write: No space left on device"):
        build_sft(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_at_the_very_end_leaves_nothing_that_looks_whole(tmp_path, monkeypatch) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 3))
    build_sft(source, tmp_path / "out")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders.os, "fsync", full)
    with pytest.raises(StorageError):
        build_sft(source, tmp_path / "out", as_trl=True)
    monkeypatch.undo()
    assert open_built(tmp_path / "out").num_samples == 3
    assert not list((tmp_path / "out").glob(".*"))


def test_a_build_without_trl_removes_the_rows_of_an_earlier_one_with_it(tmp_path) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 3))
    build_sft(source, tmp_path / "out", as_trl=True)
    assert (tmp_path / "out/trl.jsonl").exists()
    build_sft(source, tmp_path / "out")
    assert not (tmp_path / "out/trl.jsonl").exists()


def test_a_build_never_overwrites_its_source_or_a_foreign_folder(tmp_path) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 1))
    with pytest.raises(InputError, match="same folder"):
        build_sft(source, source)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/manifest.json").write_text('{"schema_version": "traceforge-run/1"}')
    with pytest.raises(InputError, match="holds something else than a build"):
        build_sft(source, tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        build_sft(source, tmp_path / "file")
    with pytest.raises(InputError, match=r"no trajectories\.jsonl in this folder"):
        build_sft(tmp_path / "run", tmp_path / "out")
    with pytest.raises(InputError, match="no such file"):
        build_sft(tmp_path / "nowhere", tmp_path / "out")


def test_an_ingest_changed_after_its_manifest_is_refused_unless_the_file_is_named(tmp_path) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 1))
    manifest = {"schema_version": "traceforge-ingest/1", "outputs": {"trajectories.jsonl": {"sha256": "0" * 64}}}
    (source / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"trajectories\.jsonl: sha256 .* changed after it was ingested"):
        build_sft(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert build_sft(source / "trajectories.jsonl", tmp_path / "out").samples == 1
    manifest["outputs"]["trajectories.jsonl"]["sha256"] = sha256(source / "trajectories.jsonl")
    (source / "manifest.json").write_text(json.dumps(manifest))
    assert build_sft(source, tmp_path / "out").samples == 1


def test_two_trajectories_of_one_id_are_refused(tmp_path) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 1), run_of("a", 2))
    with pytest.raises(InputError, match="two trajectories have the id 'a'"):
        build_sft(source, tmp_path / "out")


def test_trl_rows_hold_history_turn_and_tools_with_arguments_as_objects(tmp_path) -> None:
    tools = ({"type": "function", "function": {"name": "bash", "parameters": {"a": {}}}},)
    run = trajectory(
        "a",
        Message(role="system", content="sys"),
        user("go"),
        assistant("look", reasoning="hm", tool_calls=(ToolCall("bash", '{"command": "ls \\"x\\""}', id="c1"),)),
        Message(role="tool", content="x", tool_call_id="c1"),
        assistant("done"),
    )
    source = write_trajectories(tmp_path / "in", msgspec.structs.replace(run, tools=tools))
    assert build_sft(source, tmp_path / "out", as_trl=True).trl_rows == 2
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": {"command": 'ls "x"'}}}
    turn = {"role": "assistant", "content": "look", "reasoning_content": "hm", "tool_calls": [call]}
    start = [{"role": "system", "content": "sys"}, {"role": "user", "content": "go"}]
    assert lines(tmp_path / "out/trl.jsonl") == [
        {"prompt": start, "completion": [turn], "tools": json.dumps(tools)},
        {
            "prompt": [*start, turn, {"role": "tool", "content": "x", "tool_call_id": "c1"}],
            "completion": [{"role": "assistant", "content": "done"}],
            "tools": json.dumps(tools),
        },
    ]


def test_trl_rows_survive_the_columns_of_datasets(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")

    def tools_of(**parameters):
        return ({"type": "function", "function": {"name": "run", "parameters": parameters}},)

    def calling(name, arguments, tools):
        run = trajectory(name, user("go"), assistant("", tool_calls=(ToolCall("run", arguments, id="c"),)))
        return msgspec.structs.replace(run, tools=tools)

    runs = [run_of("plain", 2), calling("a", '{"t": "x"}', tools_of(a={})), calling("b", '{"t": 1}', tools_of(b={}))]
    build_sft(write_trajectories(tmp_path / "in", *runs), tmp_path / "out", as_trl=True)
    path = tmp_path / "out/trl.jsonl"
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == lines(path)
    assert list(json.loads(loaded[3]["tools"])[0]["function"]["parameters"]) == ["b"]


def test_arguments_that_are_no_json_object_are_counted_out_of_the_trl_rows_only(tmp_path) -> None:
    run = trajectory("a", user("go"), assistant("one"), assistant("", tool_calls=(ToolCall("bash", '{"command": '),)))
    summary = build_sft(write_trajectories(tmp_path / "in", run), tmp_path / "out", as_trl=True)
    assert summary.samples == 2
    assert summary.trl_rows == 1
    assert summary.trl_refusals["arguments_not_json"].ids == ["a#1"]
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["counts"]["trl_rows"] == 1
    assert manifest["trl_refusals"]["arguments_not_json"]["ids"] == ["a#1"]


def test_references_grow_with_turns_and_not_with_their_histories(tmp_path) -> None:
    def bytes_of(turns, name):
        build_sft(write_trajectories(tmp_path / f"{name}-in", run_of("a", turns)), tmp_path / name)
        return (tmp_path / name / "sft.jsonl").stat().st_size

    assert bytes_of(80, "long") < 2.1 * bytes_of(40, "short")


def test_memory_stays_flat_in_the_number_of_trajectories(tmp_path) -> None:
    def peak_of(count, name):
        big = "x" * 200_000
        source = tmp_path / f"{name}-in"
        write_trajectories(source, *(trajectory(f"r{n}", user(big), assistant("act")) for n in range(count)))
        tracemalloc.start()
        build_sft(source, tmp_path / name)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_of(60, "many") < peak_of(6, "few") + 500_000


def test_a_changed_or_incomplete_build_is_not_read(tmp_path) -> None:
    source = write_trajectories(tmp_path / "in", run_of("a", 2))
    out = tmp_path / "out"
    build_sft(source, out)
    assert open_built(out).num_samples == 2
    with (out / "sft.jsonl").open("ab") as handle:
        handle.write(b"{}\n")
    with pytest.raises(InputError, match=r"sft\.jsonl: sha256 .* was changed"):
        open_built(out)
    (out / "trajectories.jsonl").unlink()
    with pytest.raises(InputError, match=r"trajectories\.jsonl: missing"):
        open_built(out)
    (out / "manifest.json").unlink()
    with pytest.raises(InputError, match="the build is not whole"):
        open_built(out)
    with pytest.raises(InputError, match="ingested trajectories, not samples"):
        open_built(source)
