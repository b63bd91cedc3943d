"""Linears in 4 bits (NF4): forward and input gradient against the same weights dequantised.

On CPUs with AVX512-BF16 bitsandbytes repacks 4-bit weights at the first forward pass in evaluation mode, and later
gradients are wrong. `models/load.py` forbids it on each linear; whether the trap is there at all is tried here.
"""

from __future__ import annotations

from typing import Any

import torch

from traceforge.doctor.findings import Finding

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
_IN, _OUT, _ROWS = 512, 256, 16


def look_at_four_bit(device: torch.device, dtype: torch.dtype) -> Finding:
    """Return whether 4-bit linears are right here, before and after a pass in evaluation mode."""
    try:
        import bitsandbytes
    except ImportError:
        return Finding("4-bit", "warn", "bitsandbytes is not installed", "pip install bitsandbytes for nf4")
    layer = _layer(bitsandbytes, device, dtype)
    has_trap = bool(getattr(layer, "support_avx512bf16_for_cpu", False))
    layer.support_avx512bf16_for_cpu = False
    forward, backward = errors(layer, bitsandbytes, dtype, evaluate_first=True)
    name = str(dtype).removeprefix("torch.")
    figures = {"forward_error": forward, "backward_error": backward, "dtype": name, "repacking_cpu": has_trap}
    text = f"nf4 in {name}: forward {forward:.1e}, backward {backward:.1e} from dequantised weights"
    if not max(forward, backward) <= _TOLERANCE[dtype]:
        way_out = "set model.quantization = 'none', and install another bitsandbytes version"
        return Finding("4-bit", "fail", text, way_out, figures)
    if has_trap:
        trapped = max(errors(_layer(bitsandbytes, device, dtype), bitsandbytes, dtype, evaluate_first=True))
        figures["error_with_repacking"] = trapped
        text += f"; this CPU repacks weights in evaluation (error then {trapped:.1e}), which runs forbid"
    elif device.type == "cpu":
        text += "; this CPU does not repack weights"
    return Finding("4-bit", "pass", text, figures=figures)


def errors(layer: Any, bitsandbytes: Any, dtype: torch.dtype, *, evaluate_first: bool) -> tuple[float, float]:
    """Return the relative errors of output and input gradient of a 4-bit linear [in 512, out 256]."""
    device = layer.weight.device
    weight = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(dtype)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(_ROWS, _IN, generator=generator).to(device, dtype)
    grad = torch.randn(_ROWS, _OUT, generator=generator).to(device, dtype)
    if evaluate_first:
        layer.eval()
        with torch.no_grad():
            layer(inputs)
        layer.train()
    leaf = inputs.detach().requires_grad_()
    output = layer(leaf)
    (d_input,) = torch.autograd.grad(output, leaf, grad)
    w, x, g = (each.float().cpu() for each in (weight, inputs, grad))
    return _relative(output, x @ w.T), _relative(d_input, g @ w)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().float().cpu() - expected).norm() / expected.norm())


def _layer(bitsandbytes: Any, device: torch.device, dtype: torch.dtype) -> Any:
    layer = bitsandbytes.nn.Linear4bit(
        _IN, _OUT, bias=False, compute_dtype=dtype, quant_type="nf4", compress_statistics=True
    )
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_OUT, _IN, generator=generator).mul_(0.02).to(dtype)
    layer.weight = bitsandbytes.nn.Params4bit(
        values, requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer
    )
    return layer.to(device)
