"""The comparison of two training traces, as the record that `compare` writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from traceforge import __version__
from traceforge.oracles.trace import TrainingTrace, Weights, versions

CHECK_KIND = "framework_conformance"


@dataclass(frozen=True)
class Tolerances:
    """How far two runs of the same update in float32 may lie apart.

    The reasons stand in docs/conformance.md; each is several times what was measured and less than a tenth of what any
    planted bug moves.
    """

    loss_nats: float = 1e-5
    """Largest difference of an update's loss."""
    weight_change_relative_l2: float = 1e-3
    """Largest |ours - theirs| / |theirs| over the change of every trained tensor since the start, at every update."""
    gradient_norm_relative: float = 1e-4
    """Largest relative difference of an update's gradient norm."""
    learning_rate_relative: float = 1e-9
    """Largest relative difference of an update's learning rate: the same formula in double precision."""


@dataclass(frozen=True)
class ConformanceRecord:
    """Whether this project and a standard trainer did the same (CONTRACTS: the `compare` record).

    Args:
        status: `passed` if every check passed.
        versions: library versions, this project's too.
        framework_paths: what made the updates on each side, as dotted names.
        checks: name of each check and whether it passed.
        figures: what was measured.
        tolerances: what was allowed.
    """

    status: Literal["passed", "failed"]
    versions: dict[str, str]
    framework_paths: dict[str, str]
    checks: dict[str, bool]
    figures: dict[str, Any]
    tolerances: dict[str, float]
    check_kind: str = field(default=CHECK_KIND)

    @property
    def failed_checks(self) -> list[str]:
        """Names of the checks that did not pass."""
        return [name for name, passed in self.checks.items() if not passed]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)


def compare_traces(
    ours: TrainingTrace, theirs: TrainingTrace, tolerances: Tolerances | None = None
) -> ConformanceRecord:
    """Return the record of comparing our run with the oracle's, update by update.

    Changes of the weights since the start are compared, not the weights: a weight that hardly moves would agree with
    anything.
    """
    allowed = tolerances or Tolerances()
    worst, worst_where = _worst_change(ours, theirs)
    figures: dict[str, Any] = {
        "updates": {"ours": ours.num_updates, "theirs": theirs.num_updates},
        "samples_per_update": {"ours": list(ours.samples_per_update), "theirs": list(theirs.samples_per_update)},
        "scheduler_count": {"ours": ours.scheduler_count, "theirs": theirs.scheduler_count},
        "early_changes": {"ours": ours.early_changes, "theirs": theirs.early_changes},
        "losses": {"ours": list(ours.losses), "theirs": list(theirs.losses)},
        "learning_rates": {"ours": list(ours.learning_rates), "theirs": list(theirs.learning_rates)},
        "gradient_norms": {"ours": list(ours.gradient_norms), "theirs": list(theirs.gradient_norms)},
        "worst_loss_difference_nats": _largest(ours.losses, theirs.losses, relative=False),
        "worst_gradient_norm_difference": _largest(ours.gradient_norms, theirs.gradient_norms, relative=True),
        "worst_learning_rate_difference": _largest(ours.learning_rates, theirs.learning_rates, relative=True),
        "worst_weight_change_relative_l2": worst,
        "worst_weight_change_at": worst_where,
        "trained_tensors": len(ours.weights_before),
    }
    checks = {
        "same_number_of_updates": ours.num_updates == theirs.num_updates > 0,
        "same_samples_per_update": ours.samples_per_update == theirs.samples_per_update,
        "same_weights_at_the_start": _same(ours.weights_before, theirs.weights_before),
        "no_change_inside_an_update": ours.early_changes == theirs.early_changes == 0,
        "every_update_changed_the_weights": _always_moved(ours) and _always_moved(theirs),
        "scheduler_count": ours.scheduler_count == theirs.scheduler_count,
        "losses": figures["worst_loss_difference_nats"] <= allowed.loss_nats,
        "gradient_norms": figures["worst_gradient_norm_difference"] <= allowed.gradient_norm_relative,
        "learning_rates": figures["worst_learning_rate_difference"] <= allowed.learning_rate_relative,
        "weight_changes": worst <= allowed.weight_change_relative_l2,
    }
    return ConformanceRecord(
        status="passed" if all(checks.values()) else "failed",
        versions={"traceforge": __version__, **versions()},
        framework_paths={ours.framework: ours.path, theirs.framework: theirs.path},
        checks=checks,
        figures=figures,
        tolerances=asdict(allowed),
    )


def relative_l2(found: Tensor, wanted: Tensor) -> float:
    """Return |found - wanted| / |wanted|; infinity if one is not finite or where something is found and nothing wanted.

    Never NaN: a maximum over many tensors would pass over it.
    """
    difference = float((found.double() - wanted.double()).norm())
    size = float(wanted.double().norm())
    if difference == 0:
        return 0.0
    return difference / size if math.isfinite(difference) and math.isfinite(size) and size > 0 else math.inf


def _worst_change(ours: TrainingTrace, theirs: TrainingTrace) -> tuple[float, str]:
    """Return the largest relative difference of a tensor's change since the start, and where it was found."""
    names = ours.weights_before.keys()
    if names != theirs.weights_before.keys() or ours.num_updates != theirs.num_updates:
        return math.inf, "the runs have different tensors or updates"
    worst, where = 0.0, ""
    for number, (mine, other) in enumerate(zip(ours.weights_after, theirs.weights_after, strict=True), start=1):
        for name in names:
            found = mine[name].double() - ours.weights_before[name].double()
            wanted = other[name].double() - theirs.weights_before[name].double()
            difference = relative_l2(found, wanted)
            if difference > worst:
                worst, where = difference, f"update {number}, {name}"
    return worst, where


def _largest(ours: Sequence[float], theirs: Sequence[float], *, relative: bool) -> float:
    if len(ours) != len(theirs):
        return math.inf
    differences = [
        abs(mine - other) / (abs(other) or 1.0) if relative else abs(mine - other)
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=math.inf)


def _same(ours: Weights, theirs: Weights) -> bool:
    return ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)


def _always_moved(trace: TrainingTrace) -> bool:
    states = (trace.weights_before, *trace.weights_after)
    return all(not _same(before, after) for before, after in pairwise(states))
