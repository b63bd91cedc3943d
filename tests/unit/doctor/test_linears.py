"""Linears and cuBLAS: the first product made to fail, the one retry through cublasLt, and what is said of it."""

from __future__ import annotations

import pytest
import torch

from traceforge.doctor.examination import examine, require_fit_to_run
from traceforge.doctor.findings import Examination
from traceforge.doctor.linears import cure, loaded_libraries, look_at_linears
from traceforge.errors import MachineError

CPU = torch.device("cpu")
FAULT = "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx( handle, opa, opb, m, n, k, ...)`"


@pytest.fixture
def failing_linear(monkeypatch):
    """Let `linear` fail while products go through cuBLAS, and work once another library is preferred."""
    real = torch.nn.functional.linear
    chosen: list[str] = []

    def install(message: str, *, also_with: tuple[str, ...] = ()):
        def linear(*arguments):
            if not chosen or chosen[-1] in also_with:
                raise RuntimeError(message)
            return real(*arguments)

        monkeypatch.setattr(torch.nn.functional, "linear", linear)
        return chosen

    return install


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linears_of_this_machine_are_right(dtype):
    finding, library = look_at_linears(CPU, dtype)
    assert (finding.status, library) == ("pass", None)
    assert finding.figures["relative_error"] < 5e-3


def test_a_first_product_that_cublas_refuses_is_tried_once_more_through_cublaslt(failing_linear):
    chosen = failing_linear(FAULT)
    finding, library = look_at_linears(CPU, torch.bfloat16, choose=chosen.append)
    assert chosen == ["cublaslt"]
    assert (finding.status, library) == ("warn", "cublaslt")
    assert "CUBLAS_STATUS_INVALID_VALUE" in finding.text
    assert "this process uses that" in finding.text
    assert "12.9.1.4" in finding.way_out


def test_a_product_that_cublaslt_refuses_too_is_a_failure_with_the_cure(failing_linear):
    chosen = failing_linear(FAULT, also_with=("cublaslt",))
    finding, library = look_at_linears(CPU, torch.bfloat16, choose=chosen.append)
    assert chosen == ["cublaslt"], "one retry, not two"
    assert (finding.status, library) == ("fail", None)
    assert finding.way_out


def test_a_library_that_cannot_be_preferred_is_a_failure_and_not_a_crash(failing_linear):
    failing_linear(FAULT)

    def cannot(library: str) -> None:
        raise RuntimeError(f"Cannot set preferred backend to {library}")

    finding, _ = look_at_linears(CPU, torch.bfloat16, choose=cannot)
    assert finding.status == "fail"
    assert "Cannot set preferred backend" in finding.text


@pytest.mark.parametrize("message", ["CUDA out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"])
def test_another_error_is_not_retried(failing_linear, message):
    chosen = failing_linear(message)
    finding, _ = look_at_linears(CPU, torch.bfloat16, choose=chosen.append)
    assert chosen == []
    assert (finding.status, finding.text) == ("fail", message)


def test_a_product_that_is_wrong_without_an_error_is_a_failure(monkeypatch):
    real = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: real(x, w) * 1.05)
    finding, _ = look_at_linears(CPU, torch.float32)
    assert finding.status == "fail"
    assert "from float32" in finding.text


def test_a_gradient_that_is_wrong_on_inputs_that_are_not_contiguous_is_a_failure(monkeypatch):
    real = torch.nn.functional.linear

    def linear(x, w):
        return real(x, w) if x.is_contiguous() else real(x.detach() + 0.2 * (x - x.detach()), w)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert look_at_linears(CPU, torch.float32)[0].status == "fail"


def test_the_loaded_cublas_and_where_it_came_from_are_told(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f0-7f1 r-xp 0 08:01 1 /venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublas.so.12\n"
        "7f1-7f2 r-xp 0 08:01 2 /usr/local/cuda-12.4/lib64/libcublasLt.so.12.4.5\n"
        "7f2-7f3 r-xp 0 08:01 2 /usr/local/cuda-12.4/lib64/libcublasLt.so.12.4.5\n"
        "7f3-7f4 r-xp 0 08:01 3 /usr/lib/libc.so.6\n"
    )
    loaded = loaded_libraries(maps)
    assert loaded == [
        "/usr/local/cuda-12.4/lib64/libcublasLt.so.12.4.5",
        "/venv/lib/python3.12/site-packages/nvidia/cublas/lib/libcublas.so.12",
    ]
    assert cure(loaded).startswith("unset LD_LIBRARY_PATH: /usr/local/cuda-12.4")
    assert "nvidia-cublas-cu12" in cure(loaded[1:])
    assert loaded_libraries(tmp_path / "no such file") == []


def test_the_examination_says_which_library_is_in_use_from_here_on(failing_linear, monkeypatch):
    chosen = failing_linear(FAULT)
    monkeypatch.setattr("torch.backends.cuda.preferred_blas_library", chosen.append)
    found = examine(short=True, dtypes=(torch.bfloat16, torch.float16))
    assert found.blas_library == "cublaslt"
    assert chosen == ["cublaslt"]
    require_fit_to_run(found)


def test_a_run_cannot_start_where_products_fail(failing_linear):
    failing_linear("CUDA error: device-side assert triggered")
    with pytest.raises(MachineError, match="bfloat16 linear"):
        require_fit_to_run(examine(short=True, dtypes=(torch.bfloat16,)))
    require_fit_to_run(Examination((), 0.0))
