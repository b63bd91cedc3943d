"""The command `traceforge plan`: a run file and what the machine has in, the plan out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from traceforge.config import RunConfig
from traceforge.planning.budget import Budget
from traceforge.planning.model_config import find_shape
from traceforge.planning.page import write_page
from traceforge.planning.plan import HEAP_VARIABLE, Plan, plan_run
from traceforge.planning.rates import Estimate, estimate, rates_of
from traceforge.planning.setup import LARGEST_HEAP_BLOCK, setup_of
from traceforge.planning.views import as_dict, describe


@dataclass(frozen=True)
class PlanAnswer:
    """A plan with the name of what was planned."""

    plan: Plan
    title: str
    estimate: Estimate | None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"run_file": self.title, **as_dict(self.plan, estimate=self.estimate)}

    def describe(self) -> str:
        """Return the lines for a person."""
        return describe(self.plan, title=self.title, estimate=self.estimate)

    def write_html(self, path: Path) -> None:
        """Write the page."""
        write_page(self.plan, path, title=self.title, estimate=self.estimate)


def plan_file(
    config: RunConfig,
    *,
    title: str,
    budget: Budget,
    device: Literal["cuda", "cpu"],
    model_config: Path | None = None,
    row_tokens: int | None = None,
    card: str | None = None,
) -> PlanAnswer:
    """Return the plan of a run file; asks no network and needs no weights.

    Args:
        model_config: a config.json to use instead of the model's own.
        row_tokens: tokens of the longest row; None = the longest that the settings allow.
        card: a part of the name of a measured card, for time and energy.

    Raises:
        ModelError: the model's config.json cannot be found, or is of a family that cannot be planned.
        UsageError: the card has not been measured.
    """
    shape = find_shape(config.model.name_or_path, revision=config.model.revision, given=model_config)
    setup = setup_of(config, shape, device, row_tokens=row_tokens, heap_block_bytes=heap_block_bytes(os.environ))
    cost = None if card is None else estimate(shape, setup, rates_of(card))
    return PlanAnswer(plan_run(shape, setup, config, budget), title, cost)


def heap_block_bytes(environment: Mapping[str, str]) -> int:
    """Return the size from which on the C library gives freed blocks back to the system; see `generic_path`."""
    given = environment.get(HEAP_VARIABLE, "")
    return min(int(given), LARGEST_HEAP_BLOCK) if given.isdigit() else LARGEST_HEAP_BLOCK
