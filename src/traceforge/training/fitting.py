"""The plan of a run at work: refuse on a card what cannot fit, and set what was planned beside what was measured.

Before   the longest row is known as soon as the samples are: an update is one row if its tree fits into one, and rows
         of `training.tokens_per_row` if it does not.
After    the plan is made again for the longest row that ran, so that planned and measured speak of the same row.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Literal

import psutil

from traceforge.config import RunConfig
from traceforge.errors import DoesNotFitError, ModelError
from traceforge.evidence.schema import PlannedMemory
from traceforge.parallel.world import World
from traceforge.planning.budget import Budget
from traceforge.planning.command import heap_block_bytes
from traceforge.planning.model_config import find_shape
from traceforge.planning.plan import Plan, device_bytes, host_bytes, plan_run
from traceforge.planning.setup import setup_of
from traceforge.planning.views import as_options, gib, verdict
from traceforge.samples.branches import PairRow
from traceforge.samples.prefix_tree import tree_tokens
from traceforge.training.methods import AnyRow, Item

LongestRow = tuple[int, int]
"""Tokens of a row, and the trained ones among them."""


def longest_planned_row(
    updates: Iterable[Sequence[Item]], *, tokens_per_row: int, attention: str = "auto"
) -> LongestRow:
    """Return the longest row that these updates come to, by the sizes of their trees.

    Args:
        attention: `model.attention`; `plain` runs one sample a row, `packed` shares nothing.
    """
    longest = (1, 1)
    for items in updates:
        samples = [sample for item in items for sample in item.samples]
        if attention == "plain":
            tokens = max(sample.num_tokens for sample in samples)
        elif attention == "packed":
            tokens = min(sum(sample.num_tokens for sample in samples), tokens_per_row)
        else:
            tokens = min(tree_tokens(samples), tokens_per_row)
        trained = min(sum(sample.num_trained_tokens for sample in samples), tokens)
        longest = max(longest, (tokens, trained))
    return longest


def longest_of(rows: Iterable[AnyRow]) -> LongestRow:
    """Return the longest of some rows."""
    plain = [each.row if isinstance(each, PairRow) else each for each in rows]
    return max(((row.num_tokens, len(row.targets_N())) for row in plain), default=(0, 0))


def plan_of(config: RunConfig, world: World, folder: str, longest: LongestRow) -> tuple[Plan | None, str | None]:
    """Return the plan of a run on this rank's device; without one, why not."""
    own = world.devices[world.rank] if len(world.devices) > world.rank else world.devices[0]
    device: Literal["cuda", "cpu"] = "cuda" if own.kind == "cuda" else "cpu"
    try:
        shape = find_shape(folder)
    except ModelError as error:
        return None, error.message
    setup = setup_of(
        config,
        shape,
        device,
        row_tokens=longest[0],
        target_tokens=max(1, longest[1]),
        heap_block_bytes=heap_block_bytes(os.environ),
    )
    on_card = own.memory_bytes if device == "cuda" else None
    return plan_run(shape, setup, config, Budget(on_card, psutil.virtual_memory().total)), None


def require_fit(plan: Plan, config: RunConfig) -> str | None:
    """Return what to note of a plan that does not fit, or None if it does.

    Raises:
        DoesNotFitError: it does not fit, this is a card, and `memory.over_plan` is 'refuse'.
    """
    if plan.fits:
        return None
    ways = "; or ".join(as_options(way.settings) for way in plan.ways_out)
    said = (
        f"a row of {plan.setup.row_tokens:,} tokens {verdict(plan)}: planned {gib(plan.ledger.peak.total)} GiB at "
        f"{plan.ledger.peak.name}, {gib(host_bytes(plan.ledger, plan.setup))} on the host"
    )
    if plan.setup.device == "cuda" and config.memory.over_plan == "refuse":
        by_name = "--set memory.over_plan=warn tries all the same"
        raise DoesNotFitError(said, hint=f"{ways}; {by_name}" if ways else by_name)
    return said


def planned_memory(plan: Plan) -> PlannedMemory:
    """Return the plan as the evidence keeps it."""
    setup, ledger = plan.setup, plan.ledger
    return PlannedMemory(
        path="lean" if setup.lean else "generic",
        row_tokens=setup.row_tokens,
        trained_row_tokens=setup.target_tokens,
        moment=ledger.peak.name,
        parts_bytes={str(part): size for part, size in ledger.peak.parts.items()},
        device_bytes=device_bytes(ledger, setup) if setup.device == "cuda" else None,
        host_bytes=host_bytes(ledger, setup),
        fits=plan.fits,
    )
