"""A run and its machine: it looks first, goes on through another library if it must, and says what it saw."""

from __future__ import annotations

import csv

import pytest
import torch

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
    assert found.monitor.host.peak_process_rss_bytes <= found.mechanism_metrics.peak_host_bytes
    with (tmp_path / "runs" / "tiny" / "host.csv").open(newline="") as handle:
        assert len(list(csv.DictReader(handle))) == found.monitor.host.samples >= 2
    assert not (tmp_path / "runs" / "tiny" / "gpu.csv").exists()
    page = (tmp_path / "runs" / "tiny" / "report.html").read_text()
    assert "this process" in page
    assert {each.name for each in found.preflight.findings} >= {"processor", "memory", "disk", "libraries"}
