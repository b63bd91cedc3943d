"""A run and its machine: it looks first, goes on through another library if it must, and says what it saw."""

from __future__ import annotations

import csv
import json

import pytest
import torch

from traceforge.errors import DoesNotFitError
from traceforge.evidence.schema import Evidence

FAULT = "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`"


def evidence_of(tmp_path) -> Evidence:
    return Evidence.model_validate_json((tmp_path / "runs" / "tiny" / "evidence.json").read_text())


@pytest.fixture
def refusing_cublas(monkeypatch):
    """The first product of the process fails, until products go through another library."""
    real, chosen = torch.nn.functional.linear, []

    def linear(*arguments):
        if not chosen:
            raise RuntimeError(FAULT)
        return real(*arguments)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    return chosen


def test_a_run_whose_first_product_fails_goes_on_through_cublaslt_and_records_that(
    tmp_path, traceforge, run_file, refusing_cublas, monkeypatch
):
    monkeypatch.setattr("torch.backends.cuda.preferred_blas_library", refusing_cublas.append)
    ended = traceforge("train", run_file, "--set", "training.updates=1", "--set", "run_name=tiny")
    assert ended.code == 0, ended.err
    found = evidence_of(tmp_path)
    assert refusing_cublas == ["cublaslt"]
    assert found.preflight.blas_library == "cublaslt"
    assert any("cublaslt" in note for note in found.notes)
    (line,) = [each for each in found.preflight.findings if each.name.endswith("linear")]
    assert (line.status, "CUBLAS_STATUS_INVALID_VALUE" in line.text) == ("warn", True)


def test_a_run_on_a_machine_whose_products_fail_stops_before_it_reads_anything(
    tmp_path, traceforge, run_file, refusing_cublas
):
    ended = traceforge("train", run_file, "--set", "run_name=tiny")
    assert ended.code == 1
    assert "linear" in ended.err
    assert "way out" in ended.err
    found = evidence_of(tmp_path)
    assert (found.failure.stage, found.failure.error_type) == ("environment_preflight", "MachineError")
    assert found.dataset.content_hash is None


def test_a_run_on_the_cpu_records_its_process_and_asks_no_driver(tmp_path, traceforge, run_file, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    ended = traceforge("train", run_file, "--set", "training.updates=1", "--set", "run_name=tiny")
    assert ended.code == 0, ended.err
    found = evidence_of(tmp_path)
    assert found.monitor.reason == "no GPU was used"
    # The kernel counts the peak in batches of pages, so it may lag behind the present size by a little.
    assert found.monitor.host.peak_process_rss_bytes <= 1.02 * found.mechanism_metrics.peak_host_bytes
    assert found.mechanism_metrics.weight_bytes_by_dtype.keys() == {"float32"}
    with (tmp_path / "runs" / "tiny" / "host.csv").open(newline="") as handle:
        assert len(list(csv.DictReader(handle))) == found.monitor.host.samples >= 2
    assert not (tmp_path / "runs" / "tiny" / "gpu.csv").exists()
    page = (tmp_path / "runs" / "tiny" / "report.html").read_text()
    assert "this process" in page
    assert {each.name for each in found.preflight.findings} >= {"processor", "memory", "disk", "libraries"}


def test_a_run_keeps_its_plan_beside_what_was_measured(tmp_path, traceforge, run_file):
    ended = traceforge("train", run_file, "--set", "training.updates=2", "--set", "run_name=tiny")
    assert ended.code == 0, ended.err
    found = evidence_of(tmp_path)
    lines = (tmp_path / "runs" / "tiny" / "updates.jsonl").read_text().splitlines()
    one_row = [json.loads(line)["row_tokens"] for line in lines if json.loads(line)["micro_batches"] == 1]
    planned = found.planned_memory
    assert planned.row_tokens >= max(one_row)
    assert 0 < planned.trained_row_tokens < planned.row_tokens
    assert (planned.path, planned.device_bytes, planned.fits) == ("generic", None, True)
    assert sum(planned.parts_bytes.values()) == planned.host_bytes
    assert "Planned and measured" in (tmp_path / "runs" / "tiny" / "report.html").read_text()


def test_a_run_that_cannot_fit_stops_before_weights_are_read_with_exit_code_3(
    tmp_path, traceforge, run_file, monkeypatch
):
    def refuse(plan, config):
        raise DoesNotFitError(f"a row of {plan.setup.row_tokens} tokens does not fit", hint="shorten it")

    def load(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("traceforge.training.run.require_fit", refuse)
    monkeypatch.setattr("traceforge.training.run.load_language_model", load)
    ended = traceforge("train", run_file, "--set", "run_name=tiny")
    assert ended.code == 3
    assert "does not fit" in ended.err
    failure = evidence_of(tmp_path).failure
    assert (failure.stage, failure.error_type) == ("dataset_and_supervision", "DoesNotFitError")
