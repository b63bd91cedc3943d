"""The plan as lines for a person and as one JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traceforge.planning.budget import CARD_RESERVE
from traceforge.planning.ledger import LOADING, PARTS, Part
from traceforge.planning.plan import Plan, device_bytes, host_bytes
from traceforge.planning.rates import Estimate

_GIB = 2**30
_NAME = 34


def gib(size: int) -> str:
    """Return bytes in GiB with two digits, `-` for none."""
    return "-" if not size else f"{size / _GIB:,.2f}"


def textbook_parts(plan: Plan) -> dict[Part, int]:
    """Return the textbook accounting under the plan's names of parts."""
    book = plan.textbook
    return {
        "weights": book.weights,
        "optimizer": book.optimizer,
        "gradients": book.gradients,
        "attention": book.scores,
        "activations": book.layer_inputs,
        "logits": book.logits_unfused,
    }


def verdict(plan: Plan) -> str:
    """Return whether it fits, and into what."""
    places = []
    if plan.setup.device == "cuda" and plan.budget.device_bytes is not None:
        places.append(f"a card of {plan.budget.device_bytes / _GIB:g} GiB")
    if plan.budget.host_bytes is not None:
        places.append(f"{plan.budget.host_bytes / _GIB:g} GiB of host memory")
    if not places:
        return "not checked: say what there is with --gpu-gib and --host-gib"
    return f"{'fits' if plan.fits else 'does not fit'} {' and '.join(places)}"


def describe(plan: Plan, *, title: str, estimate: Estimate | None = None) -> str:
    """Return the lines for a person."""
    setup, shape = plan.setup, plan.shape
    on_card = setup.device == "cuda"
    peak = plan.ledger.peak
    trained = setup.trained_parameters(shape)
    lines = [
        f"{title}: {verdict(plan)}",
        f"  {count(shape.parameters())} parameters, {count(trained)} trained; rows of at most "
        f"{setup.row_tokens:,} tokens; {'lean path' if setup.lean else 'the model’s own layers'} on "
        f"{'a card' if on_card else 'the CPU'}",
        "",
        f"GiB {'on the card' if on_card else 'of the host'}, at the peak ({peak.name})".ljust(_NAME + 8)
        + f"{'planned':>10}{'without any technique':>24}",
    ]
    book = textbook_parts(plan)
    for part in PARTS:
        if peak.parts.get(part) or book.get(part):
            lines.append(f"  {part:<{_NAME + 6}}{gib(peak.parts.get(part, 0)):>10}{gib(book.get(part, 0)):>24}")
    lines.append(f"  {'in all':<{_NAME + 6}}{gib(peak.total):>10}{gib(plan.textbook.total):>24}")
    if on_card:
        lines += [f"  {'CUDA and allocator besides':<{_NAME + 6}}{gib(CARD_RESERVE):>10}", "", *_host_lines(plan)]
    lines += ["", f"{'GiB at the other moments':<{_NAME + 8}}{'planned':>10}"]
    lines += [f"  {each.name:<{_NAME + 6}}{gib(each.total):>10}" for each in plan.ledger.moments if each is not peak]
    lines += ["", f"{'peak with one technique off, GiB':<{_NAME + 8}}{'card' if on_card else 'host':>10}"]
    for other in plan.without:
        size = other.device_bytes if on_card else other.host_bytes
        lines.append(f"  {other.technique:<{_NAME + 6}}{gib(size):>10}  ({other.setting})")
    lines += _closing_lines(plan, estimate)
    return "\n".join(lines)


def _host_lines(plan: Plan) -> list[str]:
    lines = [f"{'GiB on the host':<{_NAME + 8}}{'planned':>10}"]
    lines += [f"  pinned, {part:<{_NAME - 2}}{gib(size):>10}" for part, size in plan.ledger.pinned.items() if size]
    lines += [f"  {part:<{_NAME + 6}}{gib(size):>10}" for part, size in plan.ledger.pageable.items()]
    return [*lines, f"  {'in all':<{_NAME + 6}}{gib(plan.ledger.host_bytes):>10}"]


def _closing_lines(plan: Plan, estimate: Estimate | None) -> list[str]:
    lines = [""]
    if estimate is not None:
        energy = "energy not known: this card's power has not been measured"
        if estimate.energy_j is not None:
            energy = f"{estimate.energy_j / 1000:,.1f} kJ"
        lines.append(f"one row, forward and backward: {estimate.seconds:.1f} s; {energy}")
    if plan.longest_row_tokens is not None:
        beyond = plan.shape.positions is not None and plan.longest_row_tokens > plan.shape.positions
        note = f" (the model has {plan.shape.positions:,} positions, which bind each sample)" if beyond else ""
        if not plan.longest_row_tokens:
            smallest = min(plan.ledger.moments, key=lambda moment: moment.total)
            loading = next((each for each in plan.ledger.moments if each.name == LOADING), smallest)
            note = f": {loading.name} alone takes {gib(loading.total)} GiB"
        lines.append(f"longest row that fits: {plan.longest_row_tokens:,} tokens{note}")
    if plan.is_checked and not plan.fits:
        lines.append("it would fit with:" if plan.ways_out else "no setting of these makes it fit")
        on_card = plan.setup.device == "cuda"
        for way in plan.ways_out:
            size = way.device_bytes if on_card else way.host_bytes
            lines.append(f"  {as_options(way.settings)}  ({gib(size)} GiB)")
    return lines if len(lines) > 1 else []


def as_options(settings: tuple[str, ...]) -> str:
    """Return settings as they are typed; an environment variable stands before the command."""
    options = [f"--set {each}" for each in settings if "." in each]
    variables = [f"{each} before the command" for each in settings if "." not in each]
    return " ".join(options) if not variables else " and ".join([*([" ".join(options)] if options else []), *variables])


def as_dict(plan: Plan, *, estimate: Estimate | None = None) -> dict[str, Any]:
    """Return JSON values; sizes in bytes."""
    setup, ledger = plan.setup, plan.ledger
    return {
        "fits": plan.fits if plan.is_checked else None,
        "device": setup.device,
        "path": "lean" if setup.lean else "generic",
        "row_tokens": setup.row_tokens,
        "parameters": plan.shape.parameters(),
        "trained_parameters": setup.trained_parameters(plan.shape),
        "budget": {"device_bytes": plan.budget.device_bytes, "host_bytes": plan.budget.host_bytes},
        "device_bytes": device_bytes(ledger, setup),
        "host_bytes": host_bytes(ledger, setup),
        "reserve_bytes": CARD_RESERVE if setup.device == "cuda" else 0,
        "peak": {"moment": ledger.peak.name, "parts": _plain(ledger.peak.parts)},
        "moments": {each.name: each.total for each in ledger.moments},
        "pinned": _plain(ledger.pinned),
        "pageable": _plain(ledger.pageable),
        "without_techniques": {
            **textbook_parts(plan),
            "total": plan.textbook.total,
            "scores_per_head": plan.textbook.scores_per_head,
            "logits_16_bit": plan.textbook.logits,
            "logits_32_bit": plan.textbook.logits_wide,
        },
        "without_one": [
            {
                "technique": each.technique,
                "setting": each.setting,
                "device_bytes": each.device_bytes,
                "host_bytes": each.host_bytes,
            }
            for each in plan.without
        ],
        "longest_row_tokens": plan.longest_row_tokens,
        "ways_out": [
            {"settings": list(way.settings), "device_bytes": way.device_bytes, "host_bytes": way.host_bytes}
            for way in plan.ways_out
        ],
        "estimate": None if estimate is None else {"seconds": estimate.seconds, "energy_j": estimate.energy_j},
    }


def count(parameters: int) -> str:
    """Return a number of parameters in three digits: `8.19B`, `43.6M`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)


def _plain(parts: Mapping[Part, int]) -> dict[str, int]:
    return {str(part): size for part, size in parts.items()}
