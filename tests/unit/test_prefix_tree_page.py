"""docs/prefix-trees.md says what was measured and what the code says: its numbers, its causes, its picture."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

from traceforge.samples.fork_causes import CAUSE_WORDS, WAYS_OUT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/prefix-trees.md").read_text(encoding="utf-8")
MEASURED = json.loads((ROOT / "benchmarks/results/gpu-trees.json").read_text(encoding="utf-8"))


def rows_after(heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without its head."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    table = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def test_every_figure_is_the_measured_one() -> None:
    rows = rows_after("## What it saves")
    assert len(rows) == 3
    for name, one_by_one, tree, apart_s, tree_s, faster, memory in rows:
        turns, forks = re.findall(r"(\d+) turns.* (\d+) forks", name)[0]
        found = MEASURED[f"{'continued' if 'continues' in name else 'forked'}_{turns}_turns"]
        assert int(forks) == found["forks"]
        assert "drops reasoning" in name or not found["drops_reasoning"]
        assert [one_by_one, tree] == [f"{found['tokens_one_by_one']:,}", f"{found['tokens_in_tree']:,}"]
        assert [apart_s, tree_s] == [f"{found['one_by_one_s']:.1f} s", f"{found['tree_s']:.2f} s"]
        assert faster == f"{found['speedup']:.1f}×"
        assert memory == f"{found['one_by_one_peak_gib']:.1f} → {found['tree_peak_gib']:.1f} GiB"
    assert MEASURED["gpu"] in PAGE


def test_every_cause_that_inspect_names_is_explained() -> None:
    explained = dict(rows_after("## See it on your data"))
    assert explained.keys() == {words for cause, words in CAUSE_WORDS.items() if cause != "other"}
    for cause, way_out in WAYS_OUT.items():
        assert way_out.split(" = ")[0] in explained[CAUSE_WORDS[cause]]


def test_the_picture_is_one_file_that_loads_nothing_and_describes_itself() -> None:
    text = (ROOT / "docs/prefix-tree.svg").read_text(encoding="utf-8")
    root = ET.fromstring(text)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert {"title", "desc"} <= tags
    assert not tags & {"script", "image", "use", "foreignObject"}
    assert "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    letters = [element.text for element in root.iter() if element.get("class") == "token"]
    assert len(letters) == 27 + 13 + 13  # samples, tree, row
