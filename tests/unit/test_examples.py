"""The run files under examples/, and the demo's: each loads, dry-runs offline, and says what its name says."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import pytest

from traceforge import cli
from traceforge.config import RunConfig
from traceforge.demo.tour import SFT_FILE, SIMPO_FILE
from traceforge.evidence.run_record import load_run
from traceforge.run_files import load_run_file

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
RUN_FILES = [*EXAMPLES, SFT_FILE, SIMPO_FILE]
COMMIT = re.compile(r"[0-9a-f]{40}")

by_name = pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.name)


@by_name
def test_a_run_file_loads_and_its_name_says_objective_what_and_hardware(path):
    config = load_run_file(path)
    objective, *what, hardware = path.stem.split("_")
    assert objective == config.objective.method
    assert what
    assert re.fullmatch(r"cpu|\d+gpu", hardware)


@by_name
def test_a_dry_run_registers_the_protocol_without_data_weights_or_network(path, tmp_path, monkeypatch, capsys):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run opened a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["traceforge", "train", str(path), "--dry-run", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["decision"] == "not_measured"
    record = load_run(Path(told["folder"]))
    config = load_run_file(path)
    assert record.evidence is not None
    assert record.evidence.run_mode == "dry_run"
    assert record.evidence.workload.learning_rate == config.optimizer.learning_rate
    assert record.evidence.model.requested_revision == config.model.revision
    assert Path(told["report"]).is_file()


@by_name
def test_what_comes_from_the_hub_is_pinned_to_a_commit(path):
    config = load_run_file(path)
    if not config.model.name_or_path.startswith("."):
        assert COMMIT.fullmatch(config.model.revision or "")
    if config.data.train[0].path == "tatsu-lab/alpaca":
        assert COMMIT.fullmatch(config.data.revision or "")


def test_the_textbook_experiment_is_the_reference_workload():
    config = load_run_file(ROOT / "examples" / "sft_instruction_0.5b_1gpu.toml")
    assert config.model.name_or_path == "Qwen/Qwen2.5-0.5B"
    assert [source.path for source in config.data.train] == ["tatsu-lab/alpaca"]
    assert (config.data.train_rows, config.data.evaluation_rows, config.data.max_tokens) == (24, 8, 256)
    assert (config.training.samples_per_update, config.training.updates) == (1, 8)
    assert (config.optimizer.name, config.optimizer.learning_rate, config.schedule.kind) == ("adamw", 2e-5, "constant")
    assert (config.training.seed, config.data.seed) == (42, 42)
    assert config.adapter.kind == "none"


def test_the_cpu_twin_differs_from_the_textbook_experiment_only_in_model_data_and_dtype():
    def protocol(config: RunConfig) -> dict[str, object]:
        values = config.model_dump(mode="json")
        for section, name in (
            ("model", "name_or_path"),
            ("model", "revision"),
            ("model", "dtype"),
            ("data", "train"),
            ("data", "revision"),
        ):
            del values[section][name]
        del values["run_name"]
        return values

    twin = load_run_file(ROOT / "examples" / "sft_instruction_cpu.toml")
    assert protocol(twin) == protocol(load_run_file(ROOT / "examples" / "sft_instruction_0.5b_1gpu.toml"))
    assert twin.model.dtype == "float32"


def test_the_examples_readme_names_every_run_file():
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in RUN_FILES:
        assert path.name in table
