"""A long forked row on the CPU: its memory grows with its length, not with the square of it.

Each measurement runs in a process of its own and counts how far the resident set grew above what it was when the model
was loaded. The kernels are torch's tiled ones; a mask or a score matrix of 8,192 tokens would be 64 MiB as booleans and
256 MiB a head in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MIB = 2**20
GIB = 2**30

PEAK = """
import json, sys
from pathlib import Path
import numpy as np
import psutil
import torch
from traceforge.samples.prefix_tree import build_rows
from traceforge.samples.tokens import Sample
from traceforge.training.measure import peak_host_bytes

def peak():
    # not ru_maxrss where it can be helped: it starts at the peak of the process that started this one
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return peak_host_bytes()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

def samples(length):
    # a trunk of three quarters of the row, and 16 forks of it at different tokens
    generator = np.random.default_rng(0)
    trunk = generator.integers(0, 500, length * 3 // 4)
    made = []
    for number in range(1, 17):
        ids = np.concatenate([trunk[: len(trunk) * number // 16], generator.integers(0, 500, length // 64)])
        made.append(Sample(f"s{number}", "g", "t", ids, np.r_[0.0, np.ones(len(ids) - 1)]))
    return made

length = int(sys.argv[1])
torch.set_num_threads(1)
"""

MODEL = (
    PEAK
    + """
from tests.tiny_models import tiny_language_model
from traceforge.training.update import backward, plan_update
model = tiny_language_model("qwen3", layers=4, vocabulary=500)
backward(model, plan_update(model, samples(256), tokens_per_row=256))
before = psutil.Process().memory_info().rss
update = plan_update(model, samples(length), tokens_per_row=length)
(row,) = update.rows
loss = backward(model, update)
print(json.dumps({"tokens": row.num_tokens, "forks": row.num_forks, "growth": peak() - before, "loss": loss}))
"""
)

ATTENTION = (
    PEAK
    + """
from traceforge.models import attention
from traceforge.models.kernels import assign_kernels
from traceforge.samples.rows import attention_pieces

def attend(length):
    (row,) = build_rows(samples(length), tokens_per_row=length)
    tasks = assign_kernels(attention_pieces(row.paths), torch.device("cpu"), torch.float32, 16)
    leaves = [torch.randn(1, 1, row.num_tokens, 16, requires_grad=True) for _ in range(3)]
    attention._MergedPieces.apply(*leaves, tasks, 0.25).sum().backward()
    return row

attend(256)
before = psutil.Process().memory_info().rss
row = attend(length)
print(json.dumps({"tokens": row.num_tokens, "forks": row.num_forks, "growth": peak() - before}))
"""
)


def measured(script: str, length: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", script, str(length)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == length
    assert found["forks"] == 15
    return found


def test_a_forked_row_of_8192_tokens_trains_within_2_gib_and_grows_linearly():
    half, whole = (measured(MODEL, length)["growth"] for length in (4096, 8192))
    assert whole < 2 * GIB
    # The resident size is noisy by some 100 MB; one head's [8192 x 8192] scores in float32 would be 256 MiB.
    assert whole < 2.3 * half + GIB // 8


@pytest.mark.parametrize("length", [8192, 16384])
def test_attention_over_a_forked_row_makes_nothing_of_the_size_of_a_mask(length):
    as_booleans = length**2
    assert measured(ATTENTION, length)["growth"] < as_booleans / 4
