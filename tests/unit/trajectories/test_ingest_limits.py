"""What an ingest does at the limits: a full disk, an interruption, many trajectories, one huge observation."""

from __future__ import annotations

import errno
import json
import tracemalloc
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from trajectory_logs import ANSWER, USER, names, row, write_json, write_rows

from traceforge import folders
from traceforge.errors import InputError, StorageError
from traceforge.trajectories.ingest import ingest
from traceforge.trajectories.record import read_trajectories

# Storage


class FullDisk:
    """A file on a disk that takes `room` more bytes."""

    def __init__(self, handle: BinaryIO, room: int) -> None:
        self._handle, self._room = handle, room

    def write(self, chunk: bytes) -> int:
        self._room -= len(chunk)
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._handle.write(chunk)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


@pytest.mark.parametrize("room", [0, 300, 100_000])
def test_a_full_disk_is_a_named_error_and_leaves_nothing_half_written(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *[row(str(number) * 50) for number in range(8)])
    ingest([str(path)], tmp_path / "old")
    before = (tmp_path / "old" / "trajectories.jsonl").read_bytes()
    opened = folders.HashedFile.__init__

    def on_full_disk(file: Any, path: Path) -> None:
        # The last case has room for the trajectories and none for the manifest.
        opened(file, path)
        file._handle = FullDisk(file._handle, 0 if "manifest.json" in path.name else room)

    monkeypatch.setattr(folders.HashedFile, "__init__", on_full_disk)
    for folder in ("old", "new/deep"):
        with pytest.raises(StorageError, match="No space left") as caught:
            ingest([str(path)], tmp_path / folder)
        assert caught.value.hint
    assert names(tmp_path) == ["old", "rows.jsonl"]
    assert names(tmp_path / "old") == ["manifest.json", "trajectories.jsonl"]
    assert (tmp_path / "old" / "trajectories.jsonl").read_bytes() == before


def test_an_interrupted_ingest_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "rows.jsonl", row("1"))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folders.HashedFile, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ingest([str(path)], tmp_path / "out")
    assert names(tmp_path) == ["rows.jsonl"]


def test_an_output_that_cannot_be_a_folder_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", row("1"))
    with pytest.raises(InputError, match="is a file"):
        ingest([str(path)], path)
    with pytest.raises(StorageError):
        ingest([str(path)], path / "below")


# Memory


def peak_bytes(paths: list[Path], output: Path) -> int:
    tracemalloc.start()
    try:
        ingest([str(path) for path in paths], output)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("as_lines", [True, False])
def test_memory_is_flat_in_the_number_of_trajectories(as_lines: bool, tmp_path: Path) -> None:
    peaks = []
    for count in (50, 500):
        rows = [row(f"{number} " + "x" * 20_000) for number in range(count)]
        if as_lines:
            paths = [write_rows(tmp_path / f"{count}.jsonl", *rows)]
        else:
            paths = [write_json(tmp_path / str(count) / f"{number}.json", each) for number, each in enumerate(rows)]
        del rows
        peaks.append(peak_bytes(paths, tmp_path / f"out{count}"))
    # 450 more trajectories of 20 kB would be 9 MB; an id, a hash and a file entry each are well under 1 kB.
    assert peaks[1] - peaks[0] < 450 * 2_000


def test_one_observation_of_sixty_megabytes_takes_less_than_five_times_its_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as handle:
        messages = [USER, ANSWER, {"role": "user", "content": ("x" * 79 + "\n") * 750_000}, ANSWER]
        json.dump({"messages": messages}, handle)
        handle.write("\n" + json.dumps(row("small")) + "\n")
    del messages
    size = path.stat().st_size
    assert size > 60_000_000
    assert peak_bytes([path], tmp_path / "out") < 5 * size
    lengths = [
        len(each.messages[2].content)
        for each in read_trajectories(tmp_path / "out" / "trajectories.jsonl")
        if len(each.messages) > 2
    ]
    assert lengths == [60_000_000]
