"""Prefix trees on a GPU: exactness first, then time against the samples one by one. One call, one card, one JSON.

    python benchmarks/gpu_trees.py --out DIR

1. Kernels: each rectangle kernel and their merge against float64 softmax attention.
2. Exactness in bfloat16 on tiny models: the tree may be no further from a float32 reference than the plain path is.
3. Time on the shape of a 0.6B model (random weights) with the lengths of a real 30-turn trajectory: the first update,
   updates with changing lengths, and the tree against its samples one by one, equal loss.

Weights are random: time and memory do not depend on them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_shapes import SHAPES
from traceforge.config import AdapterSettings
from traceforge.models import attention, block_sparse
from traceforge.models.adapters import add_adapter
from traceforge.models.kernels import assign_kernels
from traceforge.models.language_model import LanguageModel, choose_layout
from traceforge.samples.prefix_tree import build_rows, tree_tokens
from traceforge.samples.rows import Path as RowPath
from traceforge.samples.rows import attention_pieces
from traceforge.samples.tokens import Sample
from traceforge.training.update import backward, plan_update

SHAPE_06B: dict[str, object] = dict(SHAPES["qwen3-0.6b"])


def trajectory(turns: int, total: int, *, vocabulary: int, drops_reasoning: bool, seed: int = 0) -> list[Sample]:
    """Return the turns of one made-up trajectory; lengths follow a real 30-turn mini-swe-agent run.

    Its turns are about 45 tokens of text and 130 of reasoning, its observations 40 to 1,500. Where the template drops
    old reasoning, each turn forks from the history; otherwise each continues it.
    """
    generator = np.random.default_rng(seed)
    history = generator.integers(0, vocabulary, 1600).tolist()
    scale = (total - 1600 - turns * 180) / turns
    samples = []
    for turn in range(turns):
        reasoning = generator.integers(0, vocabulary, int(generator.integers(60, 200))).tolist()
        text = generator.integers(0, vocabulary, int(generator.integers(25, 70))).tolist()
        ids = np.array(history + reasoning + text)
        weights = np.zeros(len(ids))
        weights[len(history) :] = 1.0
        samples.append(Sample(f"t#{turn}", "t", "t", ids, weights))
        observation = generator.integers(0, vocabulary, max(20, int(generator.exponential(scale)))).tolist()
        history += ([] if drops_reasoning else reasoning) + text + observation
    return samples


def check_kernels(device: torch.device) -> dict[str, float]:
    """Return the largest relative L2 error of output and gradients of a forked row against float64 math."""
    paths = (
        RowPath(0, 5000),
        RowPath(5000, 5900, 4700),
        RowPath(5900, 6000, 5500),
        RowPath(6000, 6080, 120),
        RowPath(6080, 6100, 37),
    )
    pieces = attention_pieces(paths)
    length = paths[-1].stop
    allowed = torch.zeros(length, length, dtype=torch.bool)
    for piece in pieces:
        block = torch.ones(piece.query_stop - piece.query_start, piece.key_stop - piece.key_start, dtype=torch.bool)
        allowed[piece.query_start : piece.query_stop, piece.key_start : piece.key_stop] |= (
            block.tril() if piece.causal else block
        )
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        data = [torch.randn(1, heads, length, 64, generator=generator).to(dtype) for heads in (8, 2, 2, 8)]
        query, key, value, grad = (each.to(device) for each in data)
        leaves = [each.clone().requires_grad_(True) for each in (query, key, value)]
        tasks = assign_kernels(pieces, device, dtype, 64)
        output = attention._MergedPieces.apply(*leaves, tasks, 64**-0.5)
        found = [output, *torch.autograd.grad(output, leaves, grad)]
        exact = [each.double().requires_grad_(True) for each in (query, key, value)]
        wide_key, wide_value = (each.repeat_interleave(4, 1) for each in exact[1:])
        scores = exact[0] @ wide_key.transpose(-1, -2) * 64**-0.5
        scores = scores.masked_fill(~allowed.to(device), -torch.inf)
        reference = scores.softmax(-1) @ wide_value
        wanted = [reference, *torch.autograd.grad(reference, exact, grad.double())]
        name = " and ".join(sorted({task.kernel.name for task in tasks}))
        for part, one, other in zip(("output", "d_query", "d_key", "d_value"), found, wanted, strict=True):
            errors[f"{name} {part}"] = float((one.double() - other).norm() / other.norm())
    for name, error in errors.items():
        assert error < (1e-5 if name.startswith("cuda_efficient") else 2e-2), (name, error)
    return errors


def language_model(device: torch.device, shape: dict[str, object], dtype: torch.dtype, layout: str) -> LanguageModel:
    """Return a random Qwen3 of a shape with a LoRA adapter whose B is random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)  # the same bf16 numbers whatever the dtype, so that only the arithmetic differs
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **shape), dtype=torch.bfloat16).to(dtype)
    network.requires_grad_(False)
    network = add_adapter(network.to(device), AdapterSettings(rank=16, alpha=16), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    network.to(device)
    network.train()
    model = LanguageModel(network, device, dtype, logits_chunk_tokens=1024)
    choose_layout(model, layout)
    return model


def check_exactness(device: torch.device) -> dict[str, object]:
    """Return bf16 gradient errors of tree and plain against float32, on a tiny model; assert tree <= 1.1 x plain."""
    shape = dict(SHAPE_06B, vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                 num_attention_heads=8, num_key_value_heads=4, head_dim=64)  # fmt: skip
    found: dict[str, object] = {}
    for drops in (True, False):
        samples = trajectory(8, 4000, vocabulary=2000, drops_reasoning=drops)
        results = {}
        for name, dtype, layout in (
            ("reference", torch.float32, "plain"),
            ("plain", torch.bfloat16, "plain"),
            ("tree", torch.bfloat16, "tree"),
            ("tree32", torch.float32, "tree"),
        ):
            model = language_model(device, shape, dtype, layout)
            loss = backward(model, plan_update(model, samples, tokens_per_row=20_000))
            results[name] = (loss, {n: p.grad.double() for n, p in model.trainable()})
        loss, wanted = results["reference"]
        norm = sum(float(g.norm() ** 2) for g in wanted.values()) ** 0.5

        def error(name: str, wanted=wanted, norm=norm, results=results) -> float:
            return sum(float((results[name][1][n] - g).norm() ** 2) for n, g in wanted.items()) ** 0.5 / norm

        errors = {name: {"loss": abs(results[name][0] - loss) / loss, "gradient": error(name)} for name in results}
        assert errors["tree32"]["gradient"] < 1e-4, errors
        assert errors["tree"]["gradient"] <= 1.1 * errors["plain"]["gradient"], errors
        found["drops reasoning" if drops else "keeps reasoning"] = errors
    return found


def timed_update(model: LanguageModel, samples: list[Sample], tokens_per_row: int) -> tuple[float, float, float]:
    """Return seconds, loss and peak GiB of one forward and backward of an update."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    loss = backward(model, plan_update(model, samples, tokens_per_row=tokens_per_row))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    model.model.zero_grad(set_to_none=True)
    return seconds, loss, torch.cuda.max_memory_allocated() / 2**30


def measure(
    device: torch.device, turns: int, total: int, *, drops: bool, block_sparse_allowed: bool = True
) -> dict[str, object]:
    """Return times of one trajectory as a tree and one by one on the 0.6B shape."""
    from traceforge.memory.recompute import recompute_layers

    samples = trajectory(turns, total, vocabulary=SHAPE_06B["vocab_size"], drops_reasoning=drops)
    one_by_one = sum(sample.num_tokens for sample in samples)
    row_tokens = tree_tokens(samples)
    model = language_model(device, SHAPE_06B, torch.bfloat16, "tree")
    recompute_layers(model.base.base_model.layers)
    if not block_sparse_allowed:
        attention._FORKS_FOR_BLOCK_SPARSE = 10**9
    first = timed_update(model, samples, row_tokens)
    changing = [
        timed_update(
            model, trajectory(turns, total, vocabulary=1000, drops_reasoning=drops, seed=seed), 2 * row_tokens
        )[0]
        for seed in (1, 2, 3)
    ]
    tree = [timed_update(model, samples, row_tokens) for _ in range(3)]
    attention._FORKS_FOR_BLOCK_SPARSE = 8
    kernels = model.effective_attention()
    choose_layout(model, "plain")
    timed_update(model, samples[:2], row_tokens)
    plain = [
        timed_update(model, samples, row_tokens)
        for _ in range(2 if one_by_one < 250_000 and block_sparse_allowed else 1)
    ]
    tree_s, plain_s = (statistics.median(each[0] for each in runs) for runs in (tree, plain))
    (row,) = build_rows(samples, tokens_per_row=row_tokens)
    return {
        "turns": turns,
        "kernels": kernels,
        "drops_reasoning": drops,
        "tokens_one_by_one": one_by_one,
        "tokens_in_tree": row_tokens,
        "token_saving": one_by_one / row_tokens,
        "forks": row.num_forks,
        "pieces": len(attention_pieces(row.paths)),
        "first_update_s": first[0],
        "changing_lengths_s": changing,
        "tree_s": tree_s,
        "one_by_one_s": plain_s,
        "speedup": plain_s / tree_s,
        "tree_peak_gib": tree[-1][2],
        "one_by_one_peak_gib": plain[-1][2],
        "loss_difference": abs(tree[0][1] - plain[0][1]) / plain[0][1],
    }


def compare_attention(device: torch.device, turns: int, total: int) -> dict[str, object]:
    """Return milliseconds of one layer's attention over a forked tree: rectangles, and the block-sparse kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    samples = trajectory(turns, total, vocabulary=1000, drops_reasoning=True)
    (row,) = build_rows(samples, tokens_per_row=tree_tokens(samples))
    length, pieces = row.num_tokens, attention_pieces(row.paths)
    heads, groups, size = 16, 8, 128
    generator = torch.Generator(device).manual_seed(0)
    leaves = [
        torch.randn(1, h, length, size, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_(True)
        for h in (heads, groups, groups)
    ]
    grad = torch.randn(1, heads, length, size, device=device, dtype=torch.bfloat16, generator=generator)
    tasks = assign_kernels(pieces, device, torch.bfloat16, size)
    mask = block_sparse.block_mask(row, device)

    def rectangles() -> torch.Tensor:
        return attention._MergedPieces.apply(*leaves, tasks, size**-0.5)

    def sparse() -> torch.Tensor:
        return block_sparse.block_sparse_attention(*leaves, mask, size**-0.5)

    def plain() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    def run(function: Callable[[], torch.Tensor]) -> dict[str, float]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        torch.autograd.grad(function(), leaves, grad)
        torch.cuda.synchronize()
        first_s = time.perf_counter() - started
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            started = time.perf_counter()
            torch.autograd.grad(function(), leaves, grad)
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - started))
        return {"first_s": first_s, "forward_and_backward_ms": statistics.median(times)}

    found: dict[str, object] = {"tokens": length, "forks": row.num_forks, "pieces": len(pieces)}
    found["kernels of the rectangles"] = sorted({task.kernel.name for task in tasks})
    one, other = ([function(), *torch.autograd.grad(function(), leaves, grad)] for function in (rectangles, sparse))
    found["difference"] = max(
        float((a.float() - b.float()).norm() / a.float().norm()) for a, b in zip(one, other, strict=True)
    )
    assert found["difference"] < 2e-2, found
    found |= {"rectangles": run(rectangles), "block_sparse": run(sparse)}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, name)):
            found[f"causal row of the same length, {name}"] = run(plain)
    return found


def main() -> None:
    """Run everything and write gpu-trees.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    assert torch.cuda.is_available(), "this benchmark needs a CUDA device"
    device = torch.device("cuda")
    import transformers

    result: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }

    def note(name: str, value: object) -> None:
        result[name] = value
        print(name, json.dumps(value), flush=True)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "gpu-trees.json").write_text(json.dumps(result, indent=2) + "\n")

    note("kernels", check_kernels(device))
    note("exactness", check_exactness(device))
    note("attention_30_turns", compare_attention(device, 30, 20_000))
    note("attention_86_turns", compare_attention(device, 86, 30_000))
    note("forked_30_turns", measure(device, 30, 20_000, drops=True))
    note("continued_30_turns", measure(device, 30, 20_000, drops=False))
    note("forked_30_turns_as_rectangles", measure(device, 30, 20_000, drops=True, block_sparse_allowed=False))
    note("forked_86_turns", measure(device, 86, 30_000, drops=True))


if __name__ == "__main__":
    main()
