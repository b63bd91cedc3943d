"""From raw logs to the report by the command line, with the demo's model and on the demo itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, run
from traceforge.demo.tour import run_demo
from traceforge.evidence.schema import Evidence
from traceforge.training import run as training_run

LOGS = ROOT / "tests" / "data" / "trajectories" / "mini-swe-agent-v1"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_verb_of_the_way_from_real_logs_to_a_report(tmp_path, traceforge, smollm2):
    ingested = traceforge("ingest", LOGS / "local.traj.json", LOGS / "github_issue.traj.json", "-o", "t", "--json")
    assert ingested.code == 0, ingested.err
    assert ingested.json()["counts"] | {"trajectories": 2, "turns": 12, "refused": 0} == ingested.json()["counts"]

    built = traceforge("build", "sft", "t", "-o", "s", "--json")
    assert built.code == 0, built.err
    assert built.json()["samples"] == 12

    settings = ["--set", "data.max_tokens=1024", "--set", "data.observation_limit_tokens=64"]
    inspected = traceforge("inspect", "s", "--model", smollm2, "--html", "samples.html", "--json", *settings)
    assert inspected.code == 0, inspected.err
    statistics = inspected.json()["statistics"]
    refused = sum(each["count"] for each in statistics["refusals"].values())
    assert statistics["train"]["samples"] + refused == 12
    assert (tmp_path / "samples.html").is_file()

    (tmp_path / "run.toml").write_text(
        f'[model]\nname_or_path = "{smollm2}"\ndtype = "float32"\n[data]\ntrain = "s"\nevaluation_fraction = 0.5\n'
        "max_tokens = 1024\nobservation_limit_tokens = 64\n[optimizer]\nlearning_rate = 1e-3\n"
        "[training]\nupdates = 2\n",
        encoding="utf-8",
    )
    trained = traceforge("train", "run.toml", "--json")
    assert trained.code == 0, trained.err
    result = trained.json()
    assert result["decision"] == "accept_mechanism", result["reasons"]
    assert result["candidate"]["train_loss"] < result["baseline"]["train_loss"]
    folder = tmp_path / result["folder"]
    evidence = Evidence.model_validate_json((folder / "evidence.json").read_bytes())
    assert evidence.mechanism_metrics.updates_done == 2
    assert evidence.mechanism_metrics.parameters_changed == 30 * 7 * 2
    assert {"run.json", "manifest.json", "updates.jsonl", "evaluations.jsonl", "report.html", "adapter"} <= {
        path.name for path in folder.iterdir()
    }

    again = traceforge("evaluate", folder, "--json")
    assert again.code == 0, again.err
    for each in again.json()["sets"]:
        assert each["loss"] == pytest.approx(each["recorded_loss"], abs=1e-6)

    (folder / "report.html").unlink()
    assert traceforge("report", folder).code == 0
    assert (folder / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_goes_from_bundled_logs_to_two_reports_and_again_into_new_folders(
    tmp_path, shallow_smollm2, monkeypatch
):
    (tmp_path / ".cache" / "models").mkdir(parents=True)
    (tmp_path / ".cache" / "models" / shallow_smollm2.name).symlink_to(shallow_smollm2)
    ended = run("demo", "--updates", "1", "--json", "-o", "demo", folder=tmp_path)
    assert ended.code == 0, ended.err
    result = ended.json()
    stages = ["model", "ingest", "build", "inspect", "train", "report"]
    stages += ["build pairs", "inspect pairs", "train simpo", "report simpo"]
    assert list(result["seconds"]) == stages
    for name in ("sft", "simpo"):
        told = result[name]
        assert told["candidate"]["train_loss"] < told["baseline"]["train_loss"]
        evidence = Evidence.model_validate_json(Path(tmp_path, told["folder"], "evidence.json").read_bytes())
        assert evidence.decision == told["decision"] == "accept_mechanism"
        assert evidence.techniques.attention is not None
        assert evidence.techniques.attention.effective.startswith("tree")
    held_out = result["simpo"]["held_out"]
    assert held_out["before"]["margin"] < held_out["after"]["margin"]
    before = Path(tmp_path, result["sft"]["report"]).read_bytes()
    assert b"Preference accuracy" in Path(tmp_path, result["simpo"]["report"]).read_bytes()

    monkeypatch.chdir(tmp_path)
    real_run = training_run.run
    monkeypatch.setattr(training_run, "run", lambda config: real_run(config, dry_run=True))
    again = run_demo(Path("demo"), updates=1)
    assert str(again.sft.folder) != result["sft"]["folder"]
    assert Path(tmp_path, result["sft"]["report"]).read_bytes() == before


def test_a_transcript_sample_printed_by_inspect_reads_as_the_rendering_is_defined(traceforge, tiny_model, samples):
    settings = ["--set", "data.rendering=transcript"]
    shown = traceforge("inspect", samples, "--model", tiny_model, *settings, "--sample", "run-task-0#1", "--raw")
    assert shown.code == 0, shown.err
    assert shown.out == (
        "<|im_start|>system\nYou are learning from a debug trajectory.<|im_end|>\n"
        "<|im_start|>user\nCase: task-0\n"
        "[SYSTEM #0]\nBe brief.\n\n"
        "[USER #1]\nSolve task-0.\n\n"
        "[ASSISTANT #2]\nLook 0 at task-0.\n\n"
        "[USER #3]\nSeen 0.\n"
        "Predict next action.<|im_end|>\n"
        "<|im_start|>assistant\nLook 1 at task-0.<|im_end|>\n"
    )
