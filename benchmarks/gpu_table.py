"""Write docs/performance.md from the saved results of `gpu.py`: what was asked, what was measured, against whom.

    python benchmarks/gpu_table.py            # write the page
    python benchmarks/gpu_table.py --check    # fail if the page is not what the results say

A ratio is between processes of one call on one card; results of different calls are never divided by each other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gpu_ceilings import ceiling_s
from gpu_shapes import SHAPES

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "performance.md"
Found = dict[str, Any]


class Demand(NamedTuple):
    """One row of what must hold: the work, the demand in words, and how a call answers it (None: not measured)."""

    work: str
    demand: str
    answer: Callable[[Found], tuple[str, bool] | None]


def of(call: Found, name: str, who: str = "traceforge") -> Found | None:
    """Return a result of a call that has a time, by its name and contender, on the 8B shape in NF4."""
    wanted = {"name": name, "who": who, "shape": "qwen3-8b", "quantization": "nf4"}
    return next((each for each in call["results"] if "s" in each and wanted.items() <= each.items()), None)


Answer = Callable[[Found], tuple[str, bool] | None]


def _speed_and_memory(
    name: str, peer: str, least: float, most_gib: float
) -> Callable[[Found], tuple[str, bool] | None]:
    def answer(call: Found) -> tuple[str, bool] | None:
        ours, theirs = of(call, name), of(call, peer, "unsloth")
        if ours is None:
            return None
        gib = ours["peak_reserved_gib" if ours.get("cap_gib") else "peak_allocated_gib"]
        said = f"{ours['s']:.2f} s, {gib:.2f} GiB" + (" reserved under the cap" if ours.get("cap_gib") else "")
        if theirs is None:
            return said + ", no peer in this call", False
        ratio = theirs["s"] / ours["s"]
        return f"{said}; Unsloth {theirs['s']:.2f} s: {ratio:.2f}x", ratio >= least and gib <= most_gib

    return answer


def _pair(call: Found) -> tuple[str, bool] | None:
    ours, branch = of(call, "pair"), of(call, "branch", "unsloth")
    if ours is None:
        return None
    said = f"{ours['s']:.1f} s, {ours['peak_reserved_gib']:.2f} GiB reserved under the cap"
    if branch is None:
        return said + ", no peer in this call", False
    ratio = 2 * branch["s"] / ours["s"]
    return f"{said}; two Unsloth branches {2 * branch['s']:.1f} s: {ratio:.2f}x", ratio >= 2.0


def _tree(call: Found) -> tuple[str, bool] | None:
    tree, apart = of(call, "tree"), of(call, "apart")
    if tree is None or apart is None:
        return None
    ratio = apart["s"] / tree["s"]
    saved = f"{tree['tokens_apart']:,} tokens as {tree['tokens']:,}"
    return f"{tree['s']:.2f} s against {apart['s']:.1f} s ({saved}): {ratio:.1f}x", ratio >= 5


def _longest(call: Found) -> tuple[str, bool] | None:
    ours = of(call, "longest")
    if ours is None:
        return None
    return f"{ours['s']:.0f} s, {ours['peak_reserved_gib']:.1f} GiB, host {ours['host_pinned_gib']:.0f} GiB", True


def _idle(call: Found) -> tuple[str, bool] | None:
    ours = of(call, "sft")
    if ours is None or "profile" not in ours:
        return None
    share = ours["profile"]["idle_share"]
    return f"{100 * share:.1f}%", share < 0.08


def _growth(call: Found) -> tuple[str, bool] | None:
    rates = next((each for each in call["results"] if each.get("who") == "ceilings"), None)
    found = [of(call, name) for name in ("growth 8192", "sft", "growth 65536", "growth 131072")]
    rows = [each for each in found if each is not None]
    if rates is None or len(rows) < 3:
        return None
    shares = {row["tokens"]: _share(row, rates) for row in rows}
    said = ", ".join(f"{tokens:,}: {100 * share:.0f}%" for tokens, share in sorted(shares.items()))
    held = max(shares.values()) / min(shares.values()) <= 1.15 and max(shares) >= 131_072
    return f"share of the ceiling at {said}", held


def _share(row: Found, rates: Found) -> float:
    tokens = row["work"]["sft"]
    recompute = row.get("recompute", False)
    return ceiling_s(SHAPES[row["shape"]], rates, tokens, tokens - 1, recompute=recompute) / row["s"]


_RESIDENT, _CAPPED = "at most 6.0 GiB, {}x Unsloth", "under a 3 GiB cap, {}x Unsloth"
DEMANDS = (
    Demand("SFT 32,768, resident", _RESIDENT.format(1.18), _speed_and_memory("sft", "sft", 1.18, 6.0)),
    Demand("SFT 32,768, streamed", _CAPPED.format("1.10"), _speed_and_memory("sft streamed", "sft", 1.1, 3.0)),
    Demand("SFT 18,489, resident", _RESIDENT.format(1.15), _speed_and_memory("sft short", "sft short", 1.15, 6.0)),
    Demand("pair 77,824 + 2 x 4,096, one pass", "under a 6 GiB cap, 2.0x two Unsloth branches", _pair),
    Demand("30 turns of a 32K trajectory, one tree", "5x its samples one by one, ours", _tree),
    Demand("262,144 tokens, attention recomputed", "one update under a 24 GiB cap", _longest),
    Demand("growth from 8K to 131K", "time as FLOPs say within 15%", _growth),
    Demand("idle and stalls of a 32K update", "under 8%", _idle),
)


def page(calls: list[Found]) -> str:
    """Return the page."""
    lines = [_INTRODUCTION]
    lines += ["| work | must | measured | holds |", "|---|---|---|---|"]
    for demand in DEMANDS:
        answers = [(call, found) for call in calls if (found := demand.answer(call)) is not None]
        if not answers:
            lines.append(f"| {demand.work} | {demand.demand} | not measured yet | |")
        for call, (said, holds) in answers:
            lines.append(f"| {demand.work} | {demand.demand} | {said} ({_day(call)}) | {'yes' if holds else 'no'} |")
    for call in calls:
        lines += ["", *_call(call)]
    return "\n".join(lines) + "\n"


def _day(call: Found) -> str:
    return str(call["call"])


def _call(call: Found) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in call["versions"].items() if number)
    lines = [f"## Call: {_day(call)}", "", f"{call['date']}, {call['gpu']}; {versions}.", ""]
    if "note" in call:
        lines += [call["note"], ""]
    rates = next((each for each in call["results"] if each.get("who") == "ceilings"), None)
    if rates is not None:
        lines += [
            f"Ceilings: matmul {rates['matmul']:.0f} TFLOP/s, attention forward {rates['attention_forward']:.0f} and "
            f"backward {rates['attention_backward']:.0f} TFLOP/s ({rates['attention_kernel']}), copies "
            f"{rates['to_device_gb_per_s']:.0f} GB/s to the device and {rates['to_host_gb_per_s']:.0f} back.",
            "",
        ]
    lines.append("| who | work | s | tokens/s | share of ceiling | peak allocated | reserved | cap | host memory |")
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for each in call["results"]:
        if "work" in each:
            lines.append(_result(each, rates))
    for each in call["results"]:
        if "failure" in each:
            lines += ["", f"{each['process']} failed: {each['failure'].splitlines()[-1][:200]}"]
        if "profile" in each:
            kinds = each["profile"]["seconds_by_kind"].items()
            lines += ["", f"Seconds by kind ({each['name']}): " + ", ".join(f"{k} {v:.2f}" for k, v in kinds) + "."]
    if call.get("not_run"):
        lines += ["", f"Not run: {', '.join(call['not_run'])}."]
    return lines


def _result(each: Found, rates: Found | None) -> str:
    work = " ".join(f"{kind} {size}" for kind, size in each["work"].items())
    details = [each.get("placement"), "recomputed" if each.get("recompute") else None]
    if each.get("copies", 1) > 1:
        details.append(f"copies {each['copies']} times as slow")
    if each.get("shape") != "qwen3-8b" or each.get("quantization") != "nf4":
        details.append(f"{each.get('shape')}, {each.get('quantization')}")
    who = " ".join([each["who"], each.get("version", "")]).strip()
    name = f"{work} ({', '.join(d for d in details if d)})" if any(details) else work
    if "s" not in each:
        return f"| {who} | {name} | out of memory | | | | | {each.get('cap_gib', '')} | |"
    share = f"{100 * _share(each, rates):.0f}%" if rates and "sft" in each["work"] else ""
    host = f"{each['host_pinned_gib']:.1f} GiB" if "host_pinned_gib" in each else ""
    peak, reserved = (f"{each[key]:.2f} GiB" for key in ("peak_allocated_gib", "peak_reserved_gib"))
    cap = f"{each['cap_gib']} GiB" if each.get("cap_gib") else ""
    cells = [who, name, f"{each['s']:.2f}", f"{each['tok_per_s']:,.0f}", share, peak, reserved, cap, host]
    return f"| {' | '.join(cells)} |"


_INTRODUCTION = """\
# Performance on one GPU

Generated by `python benchmarks/gpu_table.py` from `benchmarks/results/gpu-lean*.json`; measured by
`python benchmarks/gpu.py`, which runs ours and the peers in one call on one card, each in its own process on the same
checkpoint. Qwen3-8B shape, random weights, NF4 with double quantisation, LoRA of rank 16 on the seven linears, batch 1.
A time is one whole update (for ours: planning, forward, backward, clipping, AdamW) after a warm-up. A cap is torch's
`set_per_process_memory_fraction` during the updates. Host memory is page-locked memory: activations, embedding and
output layer, and streamed weights. The ceiling is the time of matmuls and attention alone at the rates measured in the
same call (`benchmarks/gpu_ceilings.py`).
"""


def main() -> None:
    """Write or check the page."""
    calls = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("gpu-lean*.json"))]
    text = page(sorted(calls, key=lambda call: call["date"], reverse=True))
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit("error: docs/performance.md is not what the results say\n  way out: python benchmarks/gpu_table.py")


if __name__ == "__main__":
    main()
