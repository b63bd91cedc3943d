"""A run on the lean path: the run of the generic path in other memory, with what ran in its evidence."""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_training_runs import adapter_of, update_losses

STREAMED = ["--set", "memory.path=lean", "--set", "memory.placement=streamed", "--set", "memory.tile_tokens=32"]


def test_a_lean_run_has_the_losses_of_a_generic_one_and_says_what_ran(tmp_path, traceforge, run_file):
    for name, settings in (("generic", []), ("lean", STREAMED)):
        ended = traceforge("train", run_file, "--set", f"run_name={name}", *settings, "--json")
        assert ended.code == 0, ended.err
    folders = {name: tmp_path / "runs" / name for name in ("generic", "lean")}
    losses = {name: update_losses(folder) for name, folder in folders.items()}
    assert losses["lean"] == pytest.approx(losses["generic"], rel=1e-5)
    assert adapter_of(folders["lean"]).keys() == adapter_of(folders["generic"]).keys()
    paths = {
        name: json.loads((folder / "evidence.json").read_text())["techniques"]["path"]
        for name, folder in folders.items()
    }
    assert paths["generic"]["requested"] == "auto"
    assert paths["generic"]["effective"] == "generic"
    assert "pays on a GPU" in paths["generic"]["reason"]
    assert paths["lean"]["requested"] == "lean"
    assert "weights streamed" in paths["lean"]["effective"]
    assert paths["lean"]["host_pinned_bytes"] > 0
    assert "weights streamed" in (folders["lean"] / "report.html").read_text()


def test_what_a_run_cannot_honour_ends_with_exit_code_2_and_names_both(traceforge, run_file):
    for settings, named in (
        (
            ["--set", "memory.path=generic", "--set", "memory.placement=streamed"],
            ("memory.placement", "set memory.path = 'auto'"),
        ),
        (["--set", "memory.path=lean", "--set", "adapter.dropout=0.1"], ("memory.path", "dropout", "way out")),
        (["--set", "memory.path=lean", "--set", "memory.pinned_gib=0.00001"], ("raise memory.pinned_gib", "way out")),
    ):
        ended = traceforge("train", run_file, *settings)
        assert ended.code in (1, 2), ended.err
        assert all(name in ended.err for name in named), ended.err
        assert "Traceback" not in ended.err
