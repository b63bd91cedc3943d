"""What the card can do at most: matmuls, attention, and copies. Prints one `RESULT` line; and what an update needs.

An update's ceiling is the time of its matmuls and its attention alone, at these rates: projections forward, once more
in backward (all but the last of the MLP), and their input gradients; attention forward and backward; the head twice.
Adapters, norms, copies and the optimizer are free in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch


def seconds_of(run: Callable[[], Any], repeats: int = 5) -> float:
    """Return the mean time of a function on the device after two warm-up calls."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def measure(tokens: int = 32_768) -> dict[str, Any]:
    """Return rates in TFLOP/s and GB/s: bf16 matmul, attention of 32 heads over 8 of size 128, page-locked copies."""
    from traceforge.models.kernels import assign_kernels, cudnn_is_fastest
    from traceforge.samples.rows import Piece

    device = torch.device("cuda")
    left = torch.randn(tokens, 4096, device=device, dtype=torch.bfloat16)
    right = torch.randn(4096, 12_288, device=device, dtype=torch.bfloat16)
    found: dict[str, Any] = {"matmul": 2 * tokens * 4096 * 12_288 / seconds_of(lambda: left @ right) / 1e12}
    query, grad = (torch.randn(1, 32, tokens, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    key, value = (torch.randn(1, 8, tokens, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    ((_, kernel),) = assign_kernels([Piece(0, tokens, 0, tokens, True)], device, torch.bfloat16, 128)
    output, lse = kernel.forward(query, key, value, causal=True, scale=128**-0.5)
    work = 2 * tokens**2 * 4096
    forward_s = seconds_of(lambda: kernel.forward(query, key, value, causal=True, scale=128**-0.5))
    backward_s = seconds_of(
        lambda: kernel.backward(grad, (query, key, value), output, lse, causal=True, scale=128**-0.5)
    )
    found |= {
        "attention_kernel": kernel.name,
        "cudnn_is_fastest": cudnn_is_fastest(device, torch.bfloat16, 128),
        "attention_forward": work / forward_s / 1e12,
        "attention_backward": 2.5 * work / backward_s / 1e12,
    }
    host = torch.empty(2**29, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=device)
    found["to_device_gb_per_s"] = host.numel() / seconds_of(lambda: there.copy_(host, non_blocking=True)) / 1e9
    found["to_host_gb_per_s"] = host.numel() / seconds_of(lambda: host.copy_(there, non_blocking=True)) / 1e9
    return found


def ceiling_s(
    shape: dict[str, Any], rates: dict[str, Any], tokens: int, trained: int, recompute: bool = False
) -> float:
    """Return the least time in seconds of an update over one causal row, at measured rates."""
    hidden, mlp = shape["hidden_size"], shape["intermediate_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    linear = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * mlp
    matmul = 2 * tokens * (3 * linear - hidden * mlp)
    attention = 2 * tokens**2 * queries
    forwards = 2 if recompute else 1
    per_layer = matmul / rates["matmul"] + attention * forwards / rates["attention_forward"]
    per_layer += 2.5 * attention / rates["attention_backward"]
    head = 4 * trained * hidden * shape["vocab_size"] / rates["matmul"]
    return (shape["num_hidden_layers"] * per_layer + head) / 1e12


if __name__ == "__main__":
    print("RESULT " + json.dumps({"who": "ceilings", "name": "ceilings", **measure()}), flush=True)
