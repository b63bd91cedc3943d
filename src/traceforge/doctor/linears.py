"""One linear in 16 bits, forward and backward, on contiguous and other inputs, against float32.

Some combinations of torch and cuBLAS refuse such products with CUBLAS_STATUS_INVALID_VALUE, or pick up a cublasLt from
LD_LIBRARY_PATH that is not theirs. On that error, and only on that, the products are tried once more through cublasLt;
if they work there, the process stays with it, and the finding says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from traceforge.doctor.findings import Finding

FAULT = "CUBLAS_STATUS_INVALID_VALUE"
FALL_BACK = "cublaslt"
_TOLERANCE = 1e-2
"""Relative L2 against float32 on the same rounded values: rounding the result to bfloat16 alone is up to 2e-3."""
_CUDA_SHAPE = (14, 4096)
_CPU_SHAPE = (14, 512)
_LIBRARY = re.compile(r"/\S*libcublas(?:Lt)?\.so[\d.]*$")


class WrongProductError(RuntimeError):
    """A product was computed without an error, and is not right."""


def prefer(library: str) -> None:
    """Let matrix products of this process go through `cublas` or `cublaslt`."""
    torch.backends.cuda.preferred_blas_library(library)


def look_at_linears(
    device: torch.device, dtype: torch.dtype, *, choose: Callable[[str], None] = prefer
) -> tuple[Finding, str | None]:
    """Return the finding, and the library that the products of this process go through now (None on the CPU).

    Args:
        choose: how a library is preferred.
    """
    name = f"{_name(dtype)} linear"
    library = "cublas" if device.type == "cuda" else None
    try:
        worst = _try(device, dtype)
    except RuntimeError as error:
        if FAULT not in str(error):
            return _failed(name, error), library
        return _once_more(name, device, dtype, choose)
    text = f"forward and backward, contiguous and not: {worst:.1e} from float32"
    return Finding(name, "pass", text, figures={"relative_error": worst, "library": library}), library


def _once_more(
    name: str, device: torch.device, dtype: torch.dtype, choose: Callable[[str], None]
) -> tuple[Finding, str | None]:
    loaded = loaded_libraries()
    told = f"{FAULT} through cuBLAS ({', '.join(map(_without_owner, loaded)) or 'no cuBLAS is loaded'})"
    try:
        choose(FALL_BACK)
        worst = _try(device, dtype)
    except RuntimeError as error:
        first = str(error).strip().splitlines()[0]
        return Finding(name, "fail", f"{told}, and through cublasLt: {first}", cure(loaded)), None
    text = f"{told}; through cublasLt it works ({worst:.1e} from float32), and this process uses that"
    figures = {"relative_error": worst, "library": FALL_BACK}
    return Finding(name, "warn", text, cure(loaded), figures), FALL_BACK


def _try(device: torch.device, dtype: torch.dtype) -> float:
    """Return the worst relative error of a product and its gradients.

    Raises:
        RuntimeError: the library refuses it.
        WrongProductError: the error is beyond rounding.
    """
    rows, size = _CUDA_SHAPE if device.type == "cuda" else _CPU_SHAPE
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in ((size, size), (rows, size)))
    straight = torch.randn(rows, size, generator=generator).to(device, dtype)
    turned = torch.randn(size, rows, generator=generator).to(device, dtype).T
    strided = torch.randn(rows, 2 * size, generator=generator).to(device, dtype)[:, :size]
    worst = max(_error(inputs, weight, grad) for inputs in (straight, turned, strided))
    if not worst <= _TOLERANCE:
        raise WrongProductError(f"{worst:.1e} from float32 (limit {_TOLERANCE:.0e})")
    return worst


def _error(inputs: Tensor, weight: Tensor, grad: Tensor) -> float:
    inputs = inputs.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    output = torch.nn.functional.linear(inputs, weight)
    found = (output.detach(), *torch.autograd.grad(output, (inputs, weight), grad))
    x, w, g = (each.detach().float().cpu() for each in (inputs, weight, grad))
    expected = (x @ w.T, g @ w, g.T @ x)
    return max(
        float((one.float().cpu() - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)
    )


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the paths of the cuBLAS libraries that this process has loaded."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return sorted({found[0] for line in lines if (found := _LIBRARY.search(line))})


def cure(loaded: list[str]) -> str:
    """Return what to do about cuBLAS: another copy than torch's own was loaded, or torch's own is a bad one."""
    foreign = [path for path in loaded if "site-packages" not in path and "dist-packages" not in path]
    if foreign:
        return f"unset LD_LIBRARY_PATH: {_without_owner(foreign[0])} does not belong to this torch"
    return "pip install 'nvidia-cublas-cu12>=12.9.1.4' (or a torch build for another CUDA version)"


def _without_owner(path: str) -> str:
    return path.replace(str(Path.home()), "~")  # findings go into the evidence, which names nobody


def _failed(name: str, error: Exception) -> Finding:
    first = (str(error).strip().splitlines() or [""])[0]
    return Finding(name, "fail", first, "set model.dtype to another one, and reinstall torch for this machine")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
