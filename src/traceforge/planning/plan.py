"""The plan of a run file: predicted peak by part, what each technique is worth, whether it fits, and what would.

run file + model's config ─▶ Setup ─▶ Ledger ─▶ Plan
                               │
                               ├─ each technique turned off in turn      what it is worth
                               ├─ rows longer and shorter                the longest that fits
                               └─ settings that save more                what would make it fit
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from traceforge.config import RunConfig
from traceforge.planning.budget import CARD_RESERVE, Budget
from traceforge.planning.generic_path import generic_ledger
from traceforge.planning.lean_path import lean_ledger
from traceforge.planning.ledger import Ledger
from traceforge.planning.setup import Setup
from traceforge.planning.textbook import Textbook, textbook
from traceforge.samples.model_shape import ModelShape

HEAP_VARIABLE = "MALLOC_MMAP_THRESHOLD_"
"""An environment variable, not a setting of the run file: glibc gives larger freed blocks back to the system."""
_SMALL_BLOCK = 2**20
_LONGEST = 2**24


@dataclass(frozen=True)
class WithoutOne:
    """The peak with one technique turned off; `setting` is what turns it on."""

    technique: str
    setting: str
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class WayOut:
    """Settings that would make the run fit, and the peak with them."""

    settings: tuple[str, ...]
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Plan:
    """What is predicted for a run.

    Args:
        ledger: bytes by part at each moment.
        textbook: the same row without any technique.
        without: the peak with each technique turned off, the others on.
        longest_row_tokens: the longest row that fits with these settings; None = there is no budget.
        ways_out: what would make it fit; empty if it does.
    """

    shape: ModelShape
    setup: Setup
    budget: Budget
    ledger: Ledger
    textbook: Textbook
    without: tuple[WithoutOne, ...]
    longest_row_tokens: int | None
    ways_out: tuple[WayOut, ...]

    @property
    def fits(self) -> bool:
        """Whether it fits into the budget; what is not known is not checked."""
        return fits(self.ledger, self.setup, self.budget)

    @property
    def is_checked(self) -> bool:
        """Whether there is a budget at all."""
        return self.budget.host_bytes is not None or (
            self.setup.device == "cuda" and self.budget.device_bytes is not None
        )


def plan_run(shape: ModelShape, setup: Setup, config: RunConfig, budget: Budget) -> Plan:
    """Return the plan of a run.

    Args:
        setup: what the run file comes to, see `setup_of`.
        config: the run file, for the settings that a way out would change.
        budget: what the machine has.
    """
    ledger = ledger_of(shape, setup)
    longest = None
    if budget.host_bytes is not None or budget.device_bytes is not None:
        longest = longest_row(shape, setup, budget)
    return Plan(
        shape=shape,
        setup=setup,
        budget=budget,
        ledger=ledger,
        textbook=textbook(shape, setup.row_tokens),
        without=tuple(_without_each(shape, setup)),
        longest_row_tokens=longest,
        ways_out=() if fits(ledger, setup, budget) else tuple(_ways_out(shape, setup, config, budget)),
    )


def ledger_of(shape: ModelShape, setup: Setup) -> Ledger:
    """Return what a setup holds, by its path; attention may come as one rectangle or as several, and more counts."""
    if not setup.lean:
        return generic_ledger(shape, setup)
    both = (lean_ledger(shape, setup, rectangles=several) for several in (True, False))
    return max(both, key=lambda ledger: ledger.peak.total)


def host_bytes(ledger: Ledger, setup: Setup) -> int:
    """Return the bytes on the host: all of a run on the CPU, pinned and pageable ones of a run on a card."""
    return ledger.peak.total if setup.device == "cpu" else ledger.host_bytes


def device_bytes(ledger: Ledger, setup: Setup) -> int:
    """Return the bytes that torch allocates on the card at its peak; 0 on the CPU."""
    return ledger.peak.total if setup.device == "cuda" else 0


def fits(ledger: Ledger, setup: Setup, budget: Budget) -> bool:
    """Return whether a ledger fits into a budget."""
    on_card = budget.device_bytes is None or device_bytes(ledger, setup) + CARD_RESERVE <= budget.device_bytes
    on_host = budget.host_bytes is None or host_bytes(ledger, setup) <= budget.host_bytes
    return (on_card or setup.device == "cpu") and on_host


def longest_row(shape: ModelShape, setup: Setup, budget: Budget) -> int:
    """Return the longest row in tokens that fits with these settings, 0 if none does; bytes grow with the row."""

    def fits_with(tokens: int) -> bool:
        share = setup.target_tokens / setup.row_tokens
        longer = replace(setup, row_tokens=tokens, target_tokens=max(1, round(share * tokens)))
        return fits(ledger_of(shape, longer), longer, budget)

    low, high = 0, 1
    while high < _LONGEST and fits_with(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits_with(middle) else (low, middle)
    return low


def _without_each(shape: ModelShape, setup: Setup) -> list[WithoutOne]:
    turned_off: list[tuple[str, str, bool, Callable[[Setup], Setup]]] = [
        ("weights in 4 bits", "model.quantization", setup.nf4, lambda s: replace(s, nf4=False)),
        ("LoRA", "adapter.kind", setup.rank is not None, _all_trained),
        ("layers' weights on the host", "memory.placement", setup.streamed, lambda s: replace(s, streamed=False)),
        ("activations on the host", "memory.path", setup.lean and setup.device == "cuda", _generic),
        (
            "layers computed again",
            "memory.recompute_layers",
            setup.recompute_layers,
            lambda s: replace(s, recompute_layers=False),
        ),
        (
            "Adam's moments on the host",
            "optimizer.offload_state",
            setup.moments_on_host and setup.device == "cuda",
            lambda s: replace(s, moments_on_host=False),
        ),
        (
            "layer inputs on the host",
            "memory.offload_inputs",
            setup.inputs_on_host and setup.device == "cuda",
            lambda s: replace(s, inputs_on_host=False),
        ),
        ("logits in chunks", "memory.logits_chunk_tokens", setup.chunk_tokens is not None, _all_logits),
        ("fused attention", "model.attention", not setup.score_matrix, _score_matrix),
    ]
    found = []
    for technique, setting, is_on, turn_off in turned_off:
        if is_on:
            other = turn_off(setup)
            ledger = ledger_of(shape, other)
            found.append(WithoutOne(technique, setting, device_bytes(ledger, other), host_bytes(ledger, other)))
    return found


def _all_trained(setup: Setup) -> Setup:
    # The lean path and 4 bits are for frozen weights.
    again = setup.recompute_layers or setup.lean
    return replace(setup, rank=None, nf4=False, lean=False, streamed=False, recompute_layers=again)


def _generic(setup: Setup) -> Setup:
    return replace(setup, lean=False, streamed=False, recompute_attention=False, recompute_layers=False)


def _all_logits(setup: Setup) -> Setup:
    return replace(setup, chunk_tokens=None)


def _score_matrix(setup: Setup) -> Setup:
    """Store the scores: only the model's own layers could, one layer at a time if they are computed again."""
    again = setup.recompute_layers or setup.lean
    return replace(setup, lean=False, streamed=False, score_matrix=True, recompute_layers=again)


def _ways_out(shape: ModelShape, setup: Setup, config: RunConfig, budget: Budget) -> list[WayOut]:
    """Return what would make the run fit: settings that save memory, each alone or else together; or a shorter row."""
    saving = _saving_settings(setup, config)
    found: list[WayOut] = []
    for names, change in saving:
        _try(shape, change(setup), budget, names, found)
    if not found and saving:
        together, all_names = setup, dict.fromkeys(name for names, _ in saving for name in names)
        for _, change in saving:
            together = change(together)
        _try(shape, together, budget, tuple(all_names), found)
    shorter = longest_row(shape, setup, budget)
    if shorter >= 2:
        names = (f"training.tokens_per_row={shorter}",)
        if shorter < config.data.max_tokens:
            names = (f"data.max_tokens={shorter}", *names)
        _try(shape, _of_length(setup, shorter), budget, names, found)
    return found


def _of_length(setup: Setup, tokens: int) -> Setup:
    share = setup.target_tokens / setup.row_tokens
    return replace(setup, row_tokens=tokens, target_tokens=max(1, round(share * tokens)))


def _try(shape: ModelShape, setup: Setup, budget: Budget, names: tuple[str, ...], found: list[WayOut]) -> None:
    ledger = ledger_of(shape, setup)
    if fits(ledger, setup, budget):
        found.append(WayOut(names, device_bytes(ledger, setup), host_bytes(ledger, setup)))


def _saving_settings(setup: Setup, config: RunConfig) -> list[tuple[tuple[str, ...], Callable[[Setup], Setup]]]:
    """Return what saves memory and is off, as it is written after `--set`, in the order of what it costs."""
    if setup.rank is None:
        return []
    on_card, shortest = setup.device == "cuda", config.data.max_tokens
    to_lean = ("memory.recompute_layers=false",) if config.memory.recompute_layers else ()
    if config.memory.offload_inputs:
        to_lean = (*to_lean, "memory.offload_inputs=false")
    if config.memory.path == "generic":
        to_lean = (*to_lean, "memory.path=lean")
    options: list[tuple[tuple[str, ...], bool, Callable[[Setup], Setup]]] = [
        (
            (f"training.tokens_per_row={shortest}",),
            setup.row_tokens > shortest and config.objective.method == "sft",
            lambda s: _of_length(s, shortest),
        ),
        ((*to_lean, "memory.path=lean"), on_card and not setup.lean, _lean),
        (
            ("memory.recompute_layers=true",),
            not on_card and not setup.lean and not setup.recompute_layers,
            lambda s: replace(s, recompute_layers=True),
        ),
        (
            ("optimizer.offload_state=true",),
            on_card and not setup.moments_on_host and config.optimizer.name == "adamw",
            lambda s: replace(s, moments_on_host=True),
        ),
        (("model.quantization=nf4",), not setup.nf4, lambda s: replace(s, nf4=True)),
        (
            (*to_lean, "memory.recompute_attention=true"),
            on_card and not setup.recompute_attention,
            lambda s: replace(_lean(s), recompute_attention=True),
        ),
        (
            (*to_lean, "memory.placement=streamed"),
            on_card and not setup.streamed,
            lambda s: replace(_lean(s), streamed=True),
        ),
        (
            (f"{HEAP_VARIABLE}={_SMALL_BLOCK}",),
            not on_card and setup.heap_block_bytes > _SMALL_BLOCK,
            lambda s: replace(s, heap_block_bytes=_SMALL_BLOCK),
        ),
    ]
    return [(tuple(dict.fromkeys(names)), change) for names, is_off, change in options if is_off]


def _lean(setup: Setup) -> Setup:
    return replace(setup, lean=True, recompute_layers=False, inputs_on_host=False)
