"""The comparison of two training traces, as the record that `compare` writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from traceforge import __version__
from traceforge.oracles.trace import TrainingTrace, versions
from traceforge.oracles.watch import Weights

CHECK_KIND = "framework_conformance"

_SHOWN_OF_BOTH = (
    "losses",
    "learning_rates",
    "gradient_norms",
    "samples_per_update",
    "scheduler_count",
    "early_changes",
    "logged",
    "seconds",
    "peak_bytes",
)
_PREFERENCE_FIGURES = (
    "worst_loss_difference_relative_to_reward",
    "worst_log_prob_difference_nats",
    "worst_reward_difference_relative",
    "worst_accuracy_difference",
)


@dataclass(frozen=True)
class Tolerances:
    """How far two runs of the same update in float32 may lie apart: small random models with a lively adapter.

    The reasons stand in docs/conformance.md; each is several times what was measured and less than a tenth of what any
    planted bug moves. `REAL_WEIGHTS` is for the models of users.
    """

    loss_nats: float = 1e-5
    """SFT: largest difference of an update's loss."""
    loss_relative_to_reward: float = 1e-6
    """Preference: the same, relative to the larger of the loss and the rewards, whose difference it is made of."""
    log_prob_nats: float = 1e-5
    """Preference: largest difference of a side's mean log-probability."""
    reward_relative: float = 1e-6
    """Preference: largest difference of a reward or margin, relative to the larger of the two rewards."""
    gradient_relative_l2: float = 1e-4
    """Largest |ours - theirs| / |theirs| over the gradient of the first update, all trained tensors as one vector."""
    gradient_norm_relative: float = 1e-4
    """Largest relative difference of an update's gradient norm."""
    weight_change_relative_l2: float = 1e-3
    """Largest |ours - theirs| / |theirs| over the change of every trained tensor since the start, at every update."""
    weight_change_of_all_relative_l2: float = 1e-3
    """The same over all trained tensors as one vector."""
    learning_rate_relative: float = 1e-9
    """Largest relative difference of an update's learning rate: the same formula in double precision."""


REAL_WEIGHTS = Tolerances(
    loss_nats=5e-5,
    loss_relative_to_reward=1e-5,
    log_prob_nats=5e-5,
    reward_relative=1e-5,
    weight_change_relative_l2=0.1,
    weight_change_of_all_relative_l2=5e-3,
)
"""What two runs on trained weights may differ by: more layers round more often, and a new adapter (B = 0) has weights
whose gradient is rounding noise, which Adam moves by a whole learning rate in either direction."""


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
    anything. Preference runs are compared by their log-probabilities, rewards and accuracy too.
    """
    allowed = tolerances or Tolerances()
    worst, worst_where, of_all = _changes(ours, theirs)
    figures: dict[str, Any] = {
        name: {"ours": getattr(ours, name), "theirs": getattr(theirs, name)} for name in _SHOWN_OF_BOTH
    }
    figures |= {
        "updates": {"ours": ours.num_updates, "theirs": theirs.num_updates},
        "worst_loss_difference_nats": _largest(ours.losses, theirs.losses, relative=False),
        "worst_gradient_norm_difference": _largest(ours.gradient_norms, theirs.gradient_norms, relative=True),
        "worst_learning_rate_difference": _largest(ours.learning_rates, theirs.learning_rates, relative=True),
        "first_gradient_relative_l2": _vector_difference(ours.first_gradient, theirs.first_gradient),
        "worst_weight_change_relative_l2": worst,
        "worst_weight_change_at": worst_where,
        "weight_change_of_all_relative_l2": of_all,
        "trained_tensors": len(ours.weights_before),
    }
    checks = {
        "same_number_of_updates": ours.num_updates == theirs.num_updates > 0,
        "same_samples_per_update": ours.samples_per_update == theirs.samples_per_update,
        "same_weights_at_the_start": _same(ours.weights_before, theirs.weights_before),
        "no_change_inside_an_update": ours.early_changes == theirs.early_changes == 0,
        "every_update_changed_the_weights": _always_moved(ours) and _always_moved(theirs),
        "scheduler_count": ours.scheduler_count == theirs.scheduler_count,
        "gradients": figures["first_gradient_relative_l2"] <= allowed.gradient_relative_l2,
        "gradient_norms": figures["worst_gradient_norm_difference"] <= allowed.gradient_norm_relative,
        "learning_rates": figures["worst_learning_rate_difference"] <= allowed.learning_rate_relative,
        "weight_changes": worst <= allowed.weight_change_relative_l2
        and of_all <= allowed.weight_change_of_all_relative_l2,
    }
    if ours.logged or theirs.logged:
        figures |= preference_differences(ours, theirs)
        checks |= {
            "losses": figures["worst_loss_difference_relative_to_reward"] <= allowed.loss_relative_to_reward,
            "log_probs": figures["worst_log_prob_difference_nats"] <= allowed.log_prob_nats,
            "rewards": figures["worst_reward_difference_relative"] <= allowed.reward_relative,
            "accuracy": figures["worst_accuracy_difference"] == 0,
        }
    else:
        checks["losses"] = figures["worst_loss_difference_nats"] <= allowed.loss_nats
    return ConformanceRecord(
        status="passed" if all(checks.values()) else "failed",
        versions={"traceforge": __version__, **versions()},
        framework_paths={ours.framework: ours.path, theirs.framework: theirs.path},
        checks=checks,
        figures=figures,
        tolerances=asdict(allowed),
    )


def preference_differences(ours: TrainingTrace, theirs: TrainingTrace) -> dict[str, float]:
    """Return the largest differences of log-probabilities, rewards, accuracy and loss over all updates."""
    if not len(ours.logged) == len(theirs.logged) == len(ours.losses) == len(theirs.losses):
        return dict.fromkeys(_PREFERENCE_FIGURES, math.inf)
    found: dict[str, list[float]] = {name: [] for name in _PREFERENCE_FIGURES}
    for mine, other, my_loss, other_loss in zip(ours.logged, theirs.logged, ours.losses, theirs.losses, strict=True):
        differences = {name: abs(mine[name] - other[name]) for name in other}
        found["worst_log_prob_difference_nats"] += [differences["chosen_logp"], differences["rejected_logp"]]
        found["worst_reward_difference_relative"] += [
            differences[name] / reward_size(other) for name in ("chosen_reward", "rejected_reward", "margin")
        ]
        found["worst_accuracy_difference"].append(round(differences["accuracy"], 6))  # a share, held in float32
        found["worst_loss_difference_relative_to_reward"].append(
            abs(my_loss - other_loss) / loss_size(other_loss, other)
        )
    return {name: math.inf if any(map(math.isnan, each)) else max(each) for name, each in found.items()}


def reward_size(logged: Mapping[str, float]) -> float:
    """Return what differences of rewards and margins are measured against: the larger reward.

    A margin is a difference of two rewards, which may nearly cancel: what is left is as uncertain as they are.
    """
    return max(abs(logged["chosen_reward"]), abs(logged["rejected_reward"])) or 1.0


def loss_size(loss: float, logged: Mapping[str, float] | None) -> float:
    """Return what a difference of losses is measured against: 1 nat for SFT; for pairs the loss, or the rewards that
    it is made of if they are larger.
    """
    return 1.0 if logged is None else max(abs(loss), reward_size(logged))


def relative_l2(found: Tensor, wanted: Tensor) -> float:
    """Return |found - wanted| / |wanted|; infinity if one is not finite or where something is found and nothing wanted.

    Never NaN: a maximum over many tensors would pass over it.
    """
    return _ratio(float((found.double() - wanted.double()).norm()), float(wanted.double().norm()))


def _changes(ours: TrainingTrace, theirs: TrainingTrace) -> tuple[float, str, float]:
    """Return the largest relative difference of a tensor's change since the start, where, and that of all together."""
    names = ours.weights_before.keys()
    if names != theirs.weights_before.keys() or ours.num_updates != theirs.num_updates:
        return math.inf, "the runs have different tensors or updates", math.inf
    worst, where, of_all = 0.0, "", 0.0
    for number, (mine, other) in enumerate(zip(ours.weights_after, theirs.weights_after, strict=True), start=1):
        found = {name: mine[name].double() - ours.weights_before[name].double() for name in names}
        wanted = {name: other[name].double() - theirs.weights_before[name].double() for name in names}
        of_all = max(of_all, _vector_difference(found, wanted))
        for name in names:
            difference = relative_l2(found[name], wanted[name])
            if difference > worst:
                worst, where = difference, f"update {number}, {name}"
    return worst, where, of_all


def _vector_difference(ours: Weights, theirs: Weights) -> float:
    """Return the relative L2 difference of all tensors as one vector."""
    if ours.keys() != theirs.keys() or not ours:
        return math.inf
    squares = [
        (float((ours[name].double() - wanted.double()).square().sum()), float(wanted.double().square().sum()))
        for name, wanted in theirs.items()
    ]
    return _ratio(*(math.sqrt(sum(each)) for each in zip(*squares, strict=True)))


def _ratio(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if math.isfinite(difference) and math.isfinite(size) and size > 0 else math.inf


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
