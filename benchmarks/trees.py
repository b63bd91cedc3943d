"""Prefix trees on the CPU: all turns of a real trajectory, against TRL's SFTTrainer and against our own plain rows.

    python benchmarks/trees.py [--logs LOG ...] [--tokenizer FOLDER] [--repeats 2] [--threads 1] [--json FILE]

Work     Every turn of a recorded run with 25 turns or more, rendered by the model's chat template, long observations
         shortened; one update holds them all. A random Qwen3 of 4 layers with LoRA, float32. Token ids are renumbered
         to those that occur: TRL scores every position on a CPU, we score the trained ones, and a large vocabulary
         would let that decide.
Rivals   `trl`: SFTTrainer, one sample a micro-batch, accumulated over the update; `plain`: our loop, one sample a row.
         Each is a process of its own (`tree_contenders.py`, which says what is timed), and they take turns.
Must     The losses of all updates agree, the tree is at least 4 times as fast as either, and it reaches at least 70% of
         the floating-point operations that it saves. Medians of the timed updates count.
Rows     Separately: how long laying out a million tokens of samples takes; under two seconds.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import traceforge
from traceforge.config import DataSettings
from traceforge.samples.build import build_sft
from traceforge.samples.dataset import load_samples
from traceforge.samples.prefix_tree import build_rows, tree_tokens
from traceforge.samples.rows import attention_pieces
from traceforge.samples.tokenizer import load_tokenizer
from traceforge.samples.tokens import IntArray, Sample
from traceforge.trajectories.ingest import ingest
from tree_contenders import CONTENDERS, Work
from turns import take_turns

_HERE = Path(__file__).resolve().parent
_LOG = _HERE.parent / "src/traceforge/demo/data/logs/django__django-10973.traj.json"
_TOKENIZER = _HERE.parent / "tests/data/tokenizers/qwen3"
_RESULT = _HERE / "results" / "trees-cpu.json"

FEWEST_TURNS = 25
LEAST_SPEEDUP = 4.0
LEAST_SHARE = 0.7
LOSS_RELATIVE = {"trl": 1e-5, "plain": 1e-6}
MOST_SECONDS_FOR_ROWS = 2.0
WARM_UP_SAMPLES = 2
RANK = 8
_EXPLANATIONS = {
    "what": "one update over all turns of a real trajectory: prefix trees, our plain rows, TRL's SFTTrainer",
    "timed": "from samples to changed weights: (rows,) forward, backward, clipping, optimizer.step(); no data "
    "preparation. The contenders take turns in processes of their own; medians of the timed updates after a short "
    "warm-up update",
    "peak_growth_mib": "growth of the contender's resident set over all updates",
    "share_of_theory_reached": "speed-up over the ratio of floating-point operations of forward and backward (linears, "
    "LoRA, visible attention pairs, scored positions); above 1 where the rival does more than that",
    "demands": {"speedup": LEAST_SPEEDUP, "share_of_theory": LEAST_SHARE, "loss_relative": LOSS_RELATIVE},
}
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
}


def main() -> None:
    """Measure, print, save, and fail if a demand is not met."""
    options = _options()
    record = json.loads(options.json.read_text(encoding="utf-8")) if options.json.is_file() else {}
    record |= _EXPLANATIONS
    print("laying out a million tokens of samples (processor time of one thread)")
    shapes = measure_row_building()
    record["row_building"] = {**_about(), "median_of": 3, "shapes": shapes}
    missed = [
        f"{shape}: {case['seconds']:.2f} s to lay out {case['tokens']} tokens"
        for shape, case in shapes.items()
        if case["seconds"] > MOST_SECONDS_FOR_ROWS
    ]
    with _tokenizer_folder(options.tokenizer) as tokenizer:
        for log in options.logs:
            samples, vocabulary = real_samples(log, tokenizer, options.observation_limit_tokens)
            name = f"{samples[0].group_id}, {options.tokenizer.name} chat template"
            print(f"\n{name}")
            figures, unmet = measure(samples, vocabulary, options)
            shortened = {"observation_limit_tokens": options.observation_limit_tokens}
            record.setdefault("cases", {})[name] = {**_about(), **shortened, **figures}
            missed += [f"{name}: {each}" for each in unmet]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if missed:
        sys.exit("not reached:\n  " + "\n  ".join(missed))


def real_samples(log: Path, tokenizer: Path, observation_limit_tokens: int) -> tuple[list[Sample], int]:
    """Return every turn of a recorded run as a sample, token ids renumbered, and how many different ids there are."""
    with tempfile.TemporaryDirectory(prefix="traceforge-trees-") as folder:
        ingest([str(log)], Path(folder) / "in")
        build_sft(Path(folder) / "in", Path(folder) / "sft")
        settings = DataSettings(
            train=str(Path(folder) / "sft"),
            max_tokens=SHAPE["max_position_embeddings"],
            observation_limit_tokens=observation_limit_tokens,
        )
        sets = load_samples(settings, load_tokenizer(str(tokenizer)))
    samples = sets.train[0].samples
    refused = sets.statistics.refusals
    if refused or len(samples) < FEWEST_TURNS or len({sample.group_id for sample in samples}) != 1:
        sys.exit(
            f"{log}: {len(samples)} usable turns ({refused or 'none refused'}), one run of {FEWEST_TURNS} is needed"
        )
    known = np.unique(np.concatenate([sample.token_ids_S for sample in samples]))
    renumbered = [replace(each, token_ids_S=np.searchsorted(known, each.token_ids_S)) for each in samples]
    return renumbered, len(known)


def measure(
    samples: Sequence[Sample], vocabulary: int, options: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of all contenders on one update of `samples`, and the demands that were not met."""
    shape = {**SHAPE, "vocab_size": vocabulary}
    updates = (tuple(samples[:WARM_UP_SAMPLES]), *[tuple(samples)] * options.repeats)
    work = Work(shape, RANK, updates, tree_tokens(samples), options.threads)
    saving = theoretical_saving(samples, shape)
    print(
        f"  {len(samples)} samples: {saving['tokens_one_by_one']} tokens one by one, {saving['tokens_in_tree']} in the "
        f"tree ({saving['forks']} forks); saves {saving['tokens']:.1f}x the tokens, {saving['flops']:.1f}x the work\n"
        f"  {options.repeats} timed updates each, {options.threads} thread(s), load average {os.getloadavg()[0]:.1f}"
    )
    load = [os.getloadavg()[0]]
    told = take_turns(_HERE / "tree_contenders.py", CONTENDERS, work, num_updates=len(updates))
    load.append(os.getloadavg()[0])
    sides = {name: _summary(updates[1:]) for name, updates in told.items()}
    missed = [
        f"the losses of {name} and the tree differ by {difference:.1e} relative (limit {limit:.0e})"
        for name, limit in LOSS_RELATIVE.items()
        if not (difference := _loss_difference(told[name], told["tree"])) <= limit
    ]
    for name, side in sides.items():
        side["loss_difference_to_tree_relative"] = _loss_difference(told[name], told["tree"])
        side["tree_is_faster_by"] = side["median_s"] / sides["tree"]["median_s"]
        side["share_of_theory_reached"] = side["tree_is_faster_by"] / saving["flops"]
        side["tree_is_faster_by_in_cpu_time"] = side["median_cpu_s"] / sides["tree"]["median_cpu_s"]
        side["share_of_theory_reached_in_cpu_time"] = side["tree_is_faster_by_in_cpu_time"] / saving["flops"]
        _print_side(name, side)
    for name in LOSS_RELATIVE:
        speedup = sides[name]["tree_is_faster_by"]
        share = min(sides[name]["share_of_theory_reached"], sides[name]["share_of_theory_reached_in_cpu_time"])
        if speedup < LEAST_SPEEDUP:
            missed.append(f"{speedup:.2f}x as fast as {name}, {LEAST_SPEEDUP:g}x is demanded")
        if share < LEAST_SHARE:
            missed.append(f"{share:.0%} of the theoretical saving against {name}, {LEAST_SHARE:.0%} is demanded")
    model = {"family": "qwen3", "lora_rank": RANK, "dtype": "float32", **shape}
    figures = {"model": model, "theoretical_saving": saving, "load_average": load}
    figures |= {"timed_updates": options.repeats, "threads": options.threads}
    return {**figures, "contenders": sides}, missed


def theoretical_saving(samples: Sequence[Sample], shape: dict[str, Any]) -> dict[str, Any]:
    """Return how many times fewer tokens and floating-point operations the tree of `samples` needs."""
    (row,) = build_rows(samples, tokens_per_row=tree_tokens(samples))
    lengths = np.array([sample.num_tokens for sample in samples])
    tree_pairs = sum(
        _triangle(piece.query_stop - piece.query_start)
        if piece.causal
        else (piece.query_stop - piece.query_start) * (piece.key_stop - piece.key_start)
        for piece in attention_pieces(row.paths)
    )
    apart = _operations(shape, int(lengths.sum()), sum(map(_triangle, lengths.tolist())), _num_trained(samples))
    tree = _operations(shape, row.num_tokens, tree_pairs, len(row.targets_N()))
    return {
        "samples": len(samples),
        "forks": row.num_forks,
        "tokens_one_by_one": int(lengths.sum()),
        "tokens_in_tree": row.num_tokens,
        "tokens": float(lengths.sum() / row.num_tokens),
        "gflop_one_by_one": {part: round(each / 1e9, 1) for part, each in apart.items()},
        "gflop_in_tree": {part: round(each / 1e9, 1) for part, each in tree.items()},
        "flops": sum(apart.values()) / sum(tree.values()),
    }


def _operations(shape: dict[str, Any], tokens: int, pairs: int, trained: int) -> dict[str, float]:
    """Return the floating-point operations of forward and backward over frozen weights with LoRA.

    Args:
        pairs: (query, key) pairs that see each other.
        trained: positions that are scored.
    """
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    linears = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    linears += [(hidden, inner), (hidden, inner), (inner, hidden)]
    frozen = sum(wide * high for wide, high in linears)
    lora = RANK * sum(wide + high for wide, high in linears)
    return {
        "linears": layers * tokens * (4 * frozen + 6 * lora),  # 2 a weight forward, 2 for the input, 2 for the weight
        "attention": layers * pairs * 14 * queries,  # 2 products forward and 5 backward, 2 each
        "head": trained * 4 * hidden * shape["vocab_size"],
    }


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def _num_trained(samples: Sequence[Sample]) -> int:
    return sum(sample.num_trained_tokens for sample in samples)


def _summary(updates: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {
        "losses": [update["loss"] for update in updates],
        "seconds": [round(update["seconds"], 3) for update in updates],
        "median_s": statistics.median(update["seconds"] for update in updates),
        "median_cpu_s": statistics.median(update["cpu_seconds"] for update in updates),
        "peak_growth_mib": round(updates[-1]["peak_growth_bytes"] / 2**20),
    }


def _loss_difference(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> float:
    """Return the largest relative difference over all updates: later ones see whether the weights moved alike."""
    return max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(ours, theirs, strict=True))


def _print_side(name: str, side: dict[str, Any]) -> None:
    print(
        f"  {name:>6}: median {side['median_s']:7.2f} s ({side['median_cpu_s']:7.2f} s of processor time) an update, "
        f"loss {side['losses'][-1]:.6f}, peak memory {side['peak_growth_mib']:5d} MiB"
    )
    if name != "tree":
        print(
            f"          the tree is {side['tree_is_faster_by']:.2f}x as fast ({side['share_of_theory_reached']:.0%} of "
            f"theory), in processor time {side['tree_is_faster_by_in_cpu_time']:.2f}x "
            f"({side['share_of_theory_reached_in_cpu_time']:.0%})"
        )


def measure_row_building() -> dict[str, Any]:
    """Return, for several shapes of sample sets with a million tokens, the median time to lay them out as rows."""
    found = {}
    for shape, samples, tokens_per_row in _million_tokens():
        times = []
        for _ in range(3):
            began = time.process_time()  # one thread: what an idle machine takes
            rows = build_rows(samples, tokens_per_row=tokens_per_row)
            times.append(time.process_time() - began)
        found[shape] = {
            "samples": len(samples),
            "tokens": sum(sample.num_tokens for sample in samples),
            "tokens_in_rows": sum(row.num_tokens for row in rows),
            "rows": len(rows),
            "seconds": round(statistics.median(times), 4),
        }
        print(f"  {shape:>28}: {found[shape]['seconds']:6.3f} s, {len(samples):6d} samples, {len(rows):5d} rows")
    return found


def _million_tokens() -> Iterator[tuple[str, list[Sample], int]]:
    """Yield name, samples and `tokens_per_row`; each set holds a million tokens or a little more."""
    generator = np.random.default_rng(0)

    def ids(length: int) -> IntArray:
        return generator.integers(0, 150_000, length)

    def joined(parts: Sequence[Sequence[IntArray]]) -> list[Sample]:
        return [_sample(number, np.concatenate(list(each))) for number, each in enumerate(parts)]

    history = ids(40_000)
    yield "turns that continue", joined([[history[: 1000 * n]] for n in range(1, 46)]), 65_536
    yield "turns that fork", joined([[history[: 900 * n], ids(300)] for n in range(1, 45)]), 65_536
    starts = [ids(2000) for _ in range(20)]
    yield "trajectories of one task", joined([[starts[0], *starts[1:n], ids(100)] for n in range(2, 21)] * 3), 65_536
    yield "each sample a token longer", joined([[history[:n]] for n in range(2, 1420)]), 4096
    yield "preference pairs", joined([[starts[n % 20], ids(100 + n % 7)] for n in range(480)]), 8192
    yield "duplicates", joined([[history[:500]]] * 2000), 4096
    yield "short and unrelated", joined([[ids(100)] for _ in range(10_000)]), 4096
    yield "twenty tokens each", joined([[ids(20)] for _ in range(50_000)]), 4096
    yield "few and long", joined([[ids(125_000)] for _ in range(8)]), 131_072


def _sample(number: int, token_ids_S: IntArray) -> Sample:
    weights_S = np.zeros(token_ids_S.size)
    weights_S[token_ids_S.size // 2 :] = 1.0
    return Sample(f"s{number}", "g", "t", token_ids_S, weights_S)


@contextmanager
def _tokenizer_folder(source: Path) -> Iterator[Path]:
    """Give a folder that transformers can load, unpacked if the tokenizer is packed."""
    packed = source / "tokenizer.json.xz"
    if not packed.is_file():
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="traceforge-tokenizer-") as folder:
        with lzma.open(packed) as read, (Path(folder) / "tokenizer.json").open("wb") as write:
            shutil.copyfileobj(read, write)
        shutil.copy(source / "tokenizer_config.json", folder)
        yield Path(folder)


def _about() -> dict[str, Any]:
    packages = ("torch", "transformers", "peft", "trl", "accelerate", "numpy")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "traceforge": traceforge.__version__,
            **{name: version(name) for name in packages},
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, nargs="+", default=[_LOG], help="logs of runs with 25 turns or more")
    parser.add_argument("--tokenizer", type=Path, default=_TOKENIZER, help="folder of a tokenizer with a chat template")
    parser.add_argument("--observation-limit-tokens", type=int, default=32, help="observations are shortened to this")
    parser.add_argument("--repeats", type=int, default=2, help="timed updates of each contender")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="that each contender computes on; more wait for a core "
        "on a busy machine, and longest where there are many short operations",
    )
    parser.add_argument("--json", type=Path, default=_RESULT, help="where the figures are kept, case by case")
    return parser.parse_args()


if __name__ == "__main__":
    main()
