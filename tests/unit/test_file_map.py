"""The maps in README.md and ARCHITECTURE.md against the tree: what they name exists, and what exists they name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "examples/README.md", *sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")
)]  # fmt: skip


def file_map() -> dict[str, str]:
    """Return the README's map: path to role."""
    (block,) = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)
    lines = [re.split(r" {2,}", line, maxsplit=1) for line in block.splitlines()]
    return {line[0]: line[1] for line in lines}


def files_of_the_project() -> list[Path]:
    """Return every file that belongs to the project, with git's idea of what is ignored."""
    shown = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    return [Path(name) for name in shown.decode().split("\0") if name and (ROOT / name).exists()]


def test_every_path_of_the_map_exists_and_has_a_role():
    for path, role in file_map().items():
        assert (ROOT / path).exists(), path
        assert (ROOT / path).is_dir() == path.endswith("/"), path
        assert len(role) > 5, path


def test_every_part_of_the_package_and_every_top_level_entry_is_on_the_map():
    if not (ROOT / ".git").exists():
        pytest.fail("this test needs the git checkout to know what belongs to the project")
    entries = set()
    for path in files_of_the_project():
        depth = 3 if path.parts[:2] == ("src", "traceforge") else 1
        head = Path(*path.parts[:depth])
        entries.add(head.as_posix() + ("/" if len(path.parts) > depth else ""))
    listed = set(file_map()) | {"README.md"}
    assert entries <= listed, f"not on the map: {sorted(entries - listed)}"


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_and_picture_of_a_page_leads_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target and not target.startswith("mailto:"):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_every_test_file_and_source_file_that_a_page_names_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests|src|examples|benchmarks|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page}: {name}"
