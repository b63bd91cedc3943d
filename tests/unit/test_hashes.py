"""sha256 of files and folders: known values, and what does and does not change a folder's hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

from traceforge.hashes import file_sha256, folder_sha256


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_the_hash_of_a_file_is_the_sha256_of_its_bytes(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_hash_of_a_folder_is_over_names_and_hashes_in_order_of_name(tmp_path):
    folder = fill(tmp_path, {"b/c": b"2", "a": b"1"})
    lines = [f"{name}\0{hashlib.sha256(content).hexdigest()}\n" for name, content in (("a", b"1"), ("b/c", b"2"))]
    assert folder_sha256(folder) == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_content_and_names_change_the_hash_and_the_place_of_the_folder_does_not(tmp_path):
    one = folder_sha256(fill(tmp_path / "one", {"a": b"1", "b": b"2"}))
    assert one == folder_sha256(fill(tmp_path / "elsewhere", {"b": b"2", "a": b"1"}))
    assert one != folder_sha256(fill(tmp_path / "content", {"a": b"1", "b": b"3"}))
    assert one != folder_sha256(fill(tmp_path / "name", {"a": b"1", "c": b"2"}))
    assert one != folder_sha256(fill(tmp_path / "swapped", {"a": b"2", "b": b"1"}))


def test_hidden_files_and_folders_are_left_out(tmp_path):
    plain = folder_sha256(fill(tmp_path / "one", {"a": b"1"}))
    assert plain == folder_sha256(fill(tmp_path / "two", {"a": b"1", ".hidden": b"x", ".git/config": b"y"}))
