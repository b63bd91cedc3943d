"""Provenance: hashes, revisions and versions, without torch."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

import traceforge
from traceforge.errors import InputError
from traceforge.evidence.provenance import content_hash, describe_hardware, framework_versions, source_revision
from traceforge.evidence.schema import Gpu


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_content_hash_follows_names_and_bytes_and_passes_hidden_files_over(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.json").write_text("1")
    (tmp_path / "sub" / "b.json").write_text("2")
    first = content_hash(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "etag").write_text("x")
    assert content_hash(tmp_path) == first
    (tmp_path / "a.json").rename(tmp_path / "c.json")
    renamed = content_hash(tmp_path)
    (tmp_path / "c.json").write_text("3")
    assert len({first, renamed, content_hash(tmp_path)}) == 3
    assert content_hash(tmp_path / "c.json") == hashlib.sha256(b"3").hexdigest()


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        content_hash(tmp_path / "nowhere")


def test_a_checkout_has_its_commit_and_says_whether_it_was_modified(tmp_path: Path) -> None:
    package = tmp_path / "src" / "traceforge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("one")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert source_revision(package) == (commit, False)
    (package / "__init__.py").write_text("two")
    assert source_revision(package) == (commit, True)


def test_a_package_installed_inside_another_repository_has_no_revision(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("one")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    package = tmp_path / ".venv" / "site-packages" / "traceforge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    assert source_revision(package) is None


def test_versions_and_hardware_are_those_of_this_machine() -> None:
    versions = framework_versions(cuda="13.0")
    assert (versions.traceforge, versions.cuda) == (traceforge.__version__, "13.0")
    assert versions.python.split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    hardware = describe_hardware(device="cuda", gpus=[Gpu(name="card", memory_bytes=24 << 30)])
    assert hardware.memory_bytes is not None
    assert hardware.gpus[0].name == "card"


def test_evidence_and_report_import_no_torch() -> None:
    code = (
        "import sys, traceforge.evidence.report, traceforge.evidence.provenance as p, traceforge.evidence.recorder; "
        "p.framework_versions(); sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'peft')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
