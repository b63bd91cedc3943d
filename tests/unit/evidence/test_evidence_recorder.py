"""The run folder while it is written: names, whole files, lines, and a disk that is full."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from example_runs import config, evidence, finished_run

from traceforge.errors import StorageError
from traceforge.evidence import storage
from traceforge.evidence.recorder import RunRecorder, create_run_folder
from traceforge.evidence.run_record import load_run
from traceforge.evidence.schema import Candidate, Losses

UPDATE = {
    "update": 1, "micro_batches": 2, "samples": 4, "trained_tokens": 100, "row_tokens": 900, "loss": 1.5,
    "learning_rate": 2e-4, "gradient_norm": 0.7, "seconds": 0.5, "tokens_per_s": 1800.0, "peak_bytes": 1,
    "skipped": False,
}  # fmt: skip
EVALUATION = {"update": 0, "set": "train", "loss": 2.0, "trained_tokens": 9, "rows": 3, "rows_without_targets": 0}


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_threads_that_ask_for_one_name_get_a_folder_each(tmp_path: Path) -> None:
    start = threading.Barrier(16)

    def ask(_: int) -> Path:
        start.wait()
        return create_run_folder(tmp_path / "runs", "demo")

    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(ask, range(16)))
    assert sorted(folder.name for folder in folders) == sorted(["demo", *(f"demo-{number}" for number in range(2, 17))])


def test_a_name_that_is_taken_at_the_last_moment_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def overtaken(path: Path, *arguments: Any, **more: Any) -> None:
        if path.name == "demo" and not path.exists():
            real(path)  # another run, between any check and our own mkdir
        real(path, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", overtaken)
    assert create_run_folder(tmp_path, "demo").name == "demo-2"


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match="runs"):
        create_run_folder(tmp_path / "runs", "demo")


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.write_manifest({"old": True})
        before = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".reserve"))
        monkeypatch.setattr(*((storage.os, "fsync") if fails == "fsync" else (Path, "replace")), full_disk)
        with pytest.raises(StorageError, match=r"manifest\.json.*No space left") as caught:
            recorder.write_manifest({"new": True})
    assert json.loads((tmp_path / "manifest.json").read_text()) == {"old": True}
    assert "free space" in str(caught.value.hint)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_evidence_on_a_full_disk_is_written_smaller_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evidence(
        config(),
        baseline=Losses(name="base", train_loss=2.0, evaluation_loss=2.0),
        candidate=Candidate(name="after", train_loss=1.0, evaluation_loss=1.0, update_losses=(1.0,) * 1000),
    )
    real_open = Path.open

    class Small:
        """A file on a disk with 8 KiB left."""

        def __init__(self, handle: Any) -> None:
            self.handle = handle

        def __enter__(self) -> Small:
            return self

        def __exit__(self, *_: object) -> None:
            self.handle.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.handle, name)

        def write(self, content: bytes) -> None:
            self.handle.write(content[:8192])
            if len(content) > 8192:
                full_disk()

    recorder = RunRecorder(tmp_path)
    monkeypatch.setattr(Path, "open", lambda path, mode="r", **more: Small(real_open(path, mode, **more)))
    written = recorder.write_evidence(whole)
    monkeypatch.undo()
    found = json.loads(written.read_text())
    assert found["decision"] == "accept_mechanism"
    assert found["candidate"]["update_losses"] == []
    assert "updates.jsonl has them" in found["notes"][0]
    recorder.close()


def test_evidence_that_cannot_be_written_at_all_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RunRecorder(tmp_path)
    monkeypatch.setattr(storage.os, "fsync", full_disk)
    with pytest.raises(StorageError, match=r"evidence\.json"):
        recorder.write_evidence(evidence(config(), dry_run=True))
    assert not list(tmp_path.glob("*evidence.json*"))
    recorder.close()


def test_room_is_set_aside_from_the_start_until_evidence_is_written(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    reserve = tmp_path / ".reserve-for-evidence"
    assert reserve.stat().st_size == 1 << 20
    recorder.write_evidence(evidence(config(), dry_run=True))
    assert not reserve.exists()
    recorder.close()


def test_a_line_that_cannot_be_written_whole_is_not_there_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.update(UPDATE)
    whole = (tmp_path / "updates.jsonl").read_bytes()
    real = os.pwrite

    def half(descriptor: int, content: bytes, offset: int) -> int:
        if len(content) > 20:
            return real(descriptor, content[:20], offset)
        return full_disk()  # type: ignore[func-returns-value]

    monkeypatch.setattr(
        storage.os, "pwrite", lambda descriptor, content, offset: half(descriptor, content[:40], offset)
    )
    with pytest.raises(StorageError, match=r"updates\.jsonl"):
        recorder.update(UPDATE)
    assert (tmp_path / "updates.jsonl").read_bytes() == whole
    monkeypatch.undo()
    recorder.update({**UPDATE, "update": 2})
    assert [line.update for line in load_run(tmp_path).updates] == [1, 2]
    recorder.close()


def test_a_torn_line_is_counted_when_read_and_removed_when_the_run_goes_on(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.update(UPDATE)
    with (tmp_path / "updates.jsonl").open("ab") as handle:
        handle.write(b'{"update": 2, "micro_ba')
    torn = load_run(tmp_path)
    assert (len(torn.updates), torn.torn_lines) == (1, {"updates.jsonl": 1})
    with RunRecorder(tmp_path) as recorder:
        recorder.update({**UPDATE, "update": 2})
    healed = load_run(tmp_path)
    assert ([line.update for line in healed.updates], healed.torn_lines) == ([1, 2], {})
    assert "removed 23 bytes" in (tmp_path / "logs" / "rank0.log").read_text()


def test_each_line_is_on_the_disk_before_the_next_thing_happens(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.update(UPDATE)
        recorder.evaluation(EVALUATION)
        found = load_run(tmp_path)
    assert (found.updates[0].loss, found.evaluations[0].loss) == (1.5, 2.0)


def test_numbers_that_are_not_finite_become_null_and_are_named(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.update({**UPDATE, "loss": math.nan, "gradient_norm": -math.inf, "skipped": True, "margin": 0.5})
        recorder.write_manifest({"a": {"b": [1.0, math.inf]}, "non_finite_is_kept": "nan"})
    line = json.loads((tmp_path / "updates.jsonl").read_text())
    assert (line["loss"], line["gradient_norm"], line["margin"]) == (None, None, 0.5)
    assert line["non_finite"] == {"loss": "nan", "gradient_norm": "-inf"}
    assert json.loads((tmp_path / "manifest.json").read_text()) == {
        "a": {"b": [1.0, None]},
        "non_finite_is_kept": "nan",
        "non_finite": {"a.b[1]": "inf"},
    }
    assert load_run(tmp_path).skipped_updates[0].loss is None


def test_a_line_without_a_field_of_the_contract_is_our_mistake(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder, pytest.raises(AssertionError, match="gradient_norm"):
        recorder.update({name: value for name, value in UPDATE.items() if name != "gradient_norm"})


def test_a_log_that_cannot_be_written_stops_nothing_and_evidence_counts_the_lost_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = RunRecorder(tmp_path)
    monkeypatch.setattr(storage.os, "pwrite", full_disk)
    recorder.log("one\ntwo")
    monkeypatch.undo()
    found = json.loads(recorder.write_evidence(evidence(config(), dry_run=True)).read_text())
    assert found["notes"] == ["log lines that could not be written to logs/rank0.log: 2"]
    recorder.close()


def test_lines_of_many_threads_stay_whole(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: recorder.update({**UPDATE, "update": number}), range(1, 201)))
    assert sorted(line.update for line in load_run(tmp_path).updates) == list(range(1, 201))


def test_a_lone_surrogate_becomes_the_replacement_character(tmp_path: Path) -> None:
    with RunRecorder(tmp_path) as recorder:
        recorder.write_manifest({"path": "caf\udce9"})
        recorder.log("caf\udce9")
    assert json.loads((tmp_path / "manifest.json").read_bytes())["path"] == "caf�"


def test_a_finished_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    found = load_run(finished_run(tmp_path))
    assert found.missing_files == ()
    assert found.torn_lines == {}
    assert (len(found.applied_updates), len(found.skipped_updates), len(found.evaluations)) == (60, 1, 16)
    assert found.evidence is not None
    assert found.evidence.candidate.update_losses == tuple(line.loss for line in found.applied_updates)
    assert found.config is not None
    assert found.config["training"]["updates"] == 60
    assert len(found.samples) == 3


def test_a_signal_in_the_middle_of_a_line_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.update(UPDATE)
    whole = (tmp_path / "updates.jsonl").read_bytes()
    real = os.pwrite

    def stopped(descriptor: int, content: bytes, offset: int) -> int:
        real(descriptor, content[:30], offset)
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.os, "pwrite", stopped)
    with pytest.raises(KeyboardInterrupt):
        recorder.update(UPDATE)
    assert (tmp_path / "updates.jsonl").read_bytes() == whole
    recorder.close()
