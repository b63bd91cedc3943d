"""Runs of a tiny model by the command line: extending, stopping, gates, and two runs of the textbook experiment."""

from __future__ import annotations

import json
import signal
import time

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import ROOT, start
from traceforge.evidence.schema import Evidence


def update_losses(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "updates.jsonl").read_text().splitlines()]


def adapter_of(folder):
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def assert_equal_bit_for_bit(one, other):
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def test_six_updates_are_three_and_an_extension_by_three_bit_for_bit(tmp_path, traceforge, run_file):
    settings = ["--set", "schedule.kind=constant", "--set", "adapter.dropout=0.1"]
    whole = traceforge("train", run_file, "--set", "run_name=whole", *settings, "--json")
    half = traceforge("train", run_file, "--set", "run_name=half", "--set", "training.updates=3", *settings, "--json")
    assert (whole.code, half.code) == (0, 0), whole.err + half.err
    extended = traceforge(
        "train", run_file, "--extend", half.json()["folder"], "--set", "run_name=extended", *settings, "--json"
    )
    assert extended.code == 0, extended.err
    folders = {name: tmp_path / "runs" / name for name in ("whole", "half", "extended")}
    assert_equal_bit_for_bit(adapter_of(folders["whole"]), adapter_of(folders["extended"]))
    losses = {name: update_losses(folder) for name, folder in folders.items()}
    assert losses["whole"] == losses["half"] + losses["extended"]
    assert not adapter_of(folders["half"])[next(iter(adapter_of(folders["half"])))].equal(
        adapter_of(folders["whole"])[next(iter(adapter_of(folders["half"])))]
    )


def test_an_extension_that_is_no_continuation_is_refused_by_name(traceforge, run_file):
    half = traceforge("train", run_file, "--set", "training.updates=3", "--json").json()["folder"]
    for setting, named in (
        ("optimizer.learning_rate=1e-3", "optimizer.learning_rate"),
        ("training.updates=3", "3 updates"),
        ("data.max_tokens=100", "data.max_tokens"),
    ):
        extended = traceforge("train", run_file, "--extend", half, "--set", setting)
        assert extended.code == 2
        assert named in extended.err
        assert "Traceback" not in extended.err
    nothing = traceforge("train", run_file, "--extend", "no-such-run")
    assert nothing.code == 2
    assert "no-such-run: no checkpoint to go on from" in nothing.err


def test_a_held_out_loss_past_its_gate_is_rejected_with_exit_code_3(tmp_path, traceforge, run_file):
    ended = traceforge("train", run_file, "--set", "optimizer.learning_rate=3", "--set", "training.updates=1", "--json")
    assert ended.code == 3, ended.err
    assert ended.json()["decision"] == "reject"
    evidence = json.loads((tmp_path / ended.json()["folder"] / "evidence.json").read_text())
    assert evidence["candidate"]["evaluation_loss"] > evidence["baseline"]["evaluation_loss"] + 0.05
    assert (tmp_path / ended.json()["folder"] / "adapter").is_dir()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_state_and_the_run_can_go_on(tmp_path, traceforge, run_file, number, code):
    process = start(["train", run_file, "--set", "training.updates=100000"], tmp_path)
    updates = tmp_path / "runs" / "tiny" / "updates.jsonl"
    for _ in range(600):
        if updates.is_file() and len(updates.read_bytes().splitlines()) >= 3:
            break
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.2)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "--extend" in err
    done = len(update_losses(updates.parent))
    evidence = json.loads((updates.parent / "evidence.json").read_text())
    assert evidence["decision"] == "reject_until_fixed"
    assert evidence["failure"]["stage"] == "effective_updates"
    assert (updates.parent / "checkpoints" / f"update-{done:06d}" / "state.json").is_file()
    assert (updates.parent / "report.html").is_file()

    more = traceforge("train", run_file, "--extend", updates.parent, "--set", f"training.updates={done + 2}", "--json")
    assert more.code == 0, more.err
    assert len(update_losses(tmp_path / more.json()["folder"])) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_runs_of_the_textbook_experiments_cpu_twin_give_equal_ids_and_equal_losses(tmp_path, traceforge, smollm2):
    settings = [
        f"model.name_or_path={smollm2}",
        f"data.train={ROOT / 'examples' / 'data' / 'instructions.jsonl'}",
        "training.updates=2",
        "evaluation.train_samples=4",
        "evaluation.evaluation_samples=4",
    ]
    changes = [word for setting in settings for word in ("--set", setting)]
    found = []
    for _ in range(2):
        ended = traceforge("train", ROOT / "examples" / "sft_instruction_cpu.toml", *changes, "--json")
        assert ended.code == 0, ended.err
        folder = tmp_path / ended.json()["folder"]
        found.append(json.loads((folder / "evidence.json").read_text()))
        for path in (*folder.rglob("*.safetensors"), *folder.rglob("optimizer.pt")):
            path.unlink()  # two gigabytes a run
    one, other = found
    assert one["dataset"]["train_ids_hash"] == other["dataset"]["train_ids_hash"]
    assert one["dataset"]["evaluation_ids_hash"] == other["dataset"]["evaluation_ids_hash"]
    assert one["baseline"] == other["baseline"]
    assert one["candidate"] == other["candidate"]
    assert len(one["candidate"]["update_losses"]) == 2
    assert (one["workload"]["train_rows"], one["workload"]["evaluation_rows"]) == (24, 8)
    assert one["mechanism_metrics"]["trainable_share"] == 1.0
    Evidence.model_validate(one)
    unknown = {name for name, value in one["mechanism_metrics"].items() if value is None}
    assert unknown == {"peak_allocated_bytes", "peak_reserved_bytes"}, (
        "a CPU has no device memory; all else is measured"
    )


def test_all_parameters_trained_leave_a_whole_model_that_measures_as_it_was_recorded(tmp_path, traceforge, run_file):
    trained = traceforge(
        "train", run_file, "--set", "adapter.kind=none", "--set", "optimizer.learning_rate=1e-3", "--json"
    )
    assert trained.code == 0, trained.err
    folder = tmp_path / trained.json()["folder"]
    assert not (folder / "adapter").exists()
    again = traceforge("evaluate", folder, "--json")
    assert again.code == 0, again.err
    for each in again.json()["sets"]:
        assert each["loss"] == pytest.approx(each["recorded_loss"], abs=1e-6)
