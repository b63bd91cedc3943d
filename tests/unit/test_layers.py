"""The layers that ARCHITECTURE.md shows are the ones that import-linter enforces, and every part has its place."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


def enforced() -> list[set[str]]:
    """Return the layers of the contract, top first."""
    (contract,) = [each for each in CONTRACTS if each["type"] == "layers"]
    return [{name.strip().removeprefix("traceforge.") for name in line.split("|")} for line in contract["layers"]]


def shown() -> list[set[str]]:
    """Return the layers as ARCHITECTURE.md shows them."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"## Layers.*?```\n(.*?)```", text, flags=re.DOTALL)
    return [{name.strip() for name in line.split("|")} for line in block.splitlines()]


def test_the_layers_shown_are_the_layers_enforced():
    assert shown() == enforced()


def test_every_part_of_the_package_has_a_layer():
    package = ROOT / "src" / "traceforge"
    parts = {path.name for path in package.iterdir() if (path / "__init__.py").is_file()}
    parts |= {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    assert parts == set().union(*enforced())


def test_the_parts_said_to_import_no_torch_are_the_ones_that_are_checked():
    (contract,) = [each for each in CONTRACTS if "torch" in each.get("forbidden_modules", ())]
    checked = {name.removeprefix("traceforge.") for name in contract["source_modules"]}
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    sentence = re.search(r"\n([^\n]*) import no torch", text)
    assert sentence is not None
    said = set(re.findall(r"`(\w+)`", sentence[1]))
    assert said <= checked
    assert {"config", "trajectories", "samples", "evidence"} <= said
