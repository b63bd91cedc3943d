"""The decision: what follows from the losses, the gate and the failure of a run, as a pure function.

Words    `accept_mechanism` says that training did what it should on this data, and no more than that: not that the
         model solves more tasks.
Numbers  A loss of None was not measured. One that is NaN or infinite was measured, and is broken.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

RunMode = Literal["dry_run", "real"]
Stage = Literal[
    "environment_preflight",
    "revision_resolution",
    "dataset_and_supervision",
    "model_loading_and_baseline",
    "effective_updates",
    "paired_evaluation",
    "saving",
]
EvidenceLevel = Literal["dry_run", "real_model_training_mechanism_benchmark", "failed_real_attempt"]
Decision = Literal["not_measured", "accept_mechanism", "tune", "reject", "reject_until_fixed"]
CheckName = Literal["training_loss_fell", "evaluation_loss_finite", "evaluation_loss_within_limit"]

DECISIONS_OF_LEVEL: dict[EvidenceLevel, frozenset[Decision]] = {
    "dry_run": frozenset({"not_measured"}),
    "real_model_training_mechanism_benchmark": frozenset({"accept_mechanism", "tune", "reject"}),
    "failed_real_attempt": frozenset({"reject_until_fixed"}),
}


class EvidencePart(BaseModel):
    """A frozen part of evidence.json; an unknown field is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, json_schema_serialization_defaults_required=True
    )


class Failure(EvidencePart):
    """Where and why a run stopped."""

    stage: Stage
    error_type: str
    message: str
    hint: str | None = None
    """The way out, if the error knew one."""
    rank: int | None = None
    """Which of several ranks it was that failed; null in a run of one process."""
    exit_code: int | None = None
    """With `rank`: what that rank's process ended with; below 0 = the signal that killed it."""


class Losses(EvidencePart):
    """Losses of one state of the model on the fixed training and held-out sets, in nats per trained token."""

    name: str
    train_loss: float | None = None
    evaluation_loss: float | None = None


class Check(EvidencePart):
    """One condition of the decision, with its numbers."""

    name: CheckName
    before: float | None = None
    """The baseline's loss."""
    after: float | None = None
    """The candidate's loss."""
    limit: float | None = None
    """Most that `after` may lie above `before`; null where the check has no such limit."""
    held: bool | None = None
    """null = could not be checked."""


class Verdict(EvidencePart):
    """A decision with its reasons. Its fields are fields of `Evidence`: `Evidence(..., **verdict.model_dump())`."""

    evidence_level: EvidenceLevel
    decision: Decision
    decision_reasons: tuple[str, ...]
    checks: tuple[Check, ...] = ()


_Severity = Literal["reject", "tune", "accept_mechanism"]
_STRONGEST_FIRST: tuple[_Severity, ...] = ("reject", "tune", "accept_mechanism")


class _Finding(NamedTuple):
    check: Check
    severity: _Severity
    reason: str | None
    """None where another finding already says it."""


def decide(
    *,
    run_mode: RunMode,
    failure: Failure | None,
    baseline: Losses,
    candidate: Losses,
    has_evaluation_set: bool,
    max_loss_increase: float,
    unit: str = "nats per token",
) -> Verdict:
    """Return the decision, its level, its reasons in plain words (the strongest first) and the checks behind it.

    In order:

    * a dry run is `not_measured`, also one that failed;
    * a failure is `reject_until_fixed`;
    * `reject`: a loss after training is not finite (one that should have been measured and is missing counts as
      such), a baseline is not finite, or the held-out loss ended more than `max_loss_increase` above its baseline;
    * `tune`: the training loss did not fall, there is no baseline, or nothing was held out;
    * else `accept_mechanism`.
    """
    if run_mode == "dry_run":
        reasons = ["A dry run registers the protocol: no weights were touched and nothing was measured."]
        if failure is not None:
            reasons.insert(0, f"The dry run itself stopped at {failure.stage}: {failure.message}")
        return Verdict(evidence_level="dry_run", decision="not_measured", decision_reasons=tuple(reasons))
    if failure is not None:
        reason = f"The run stopped at {failure.stage} with {failure.error_type}: {failure.message}"
        return Verdict(evidence_level="failed_real_attempt", decision="reject_until_fixed", decision_reasons=(reason,))
    findings = [
        _training_loss_fell(baseline.train_loss, candidate.train_loss, unit),
        _evaluation_loss_finite(baseline.evaluation_loss, candidate.evaluation_loss, has_evaluation_set),
        _evaluation_loss_within_limit(baseline.evaluation_loss, candidate.evaluation_loss, max_loss_increase, unit),
    ]
    ranked = sorted(findings, key=lambda finding: _STRONGEST_FIRST.index(finding.severity))
    return Verdict(
        evidence_level="real_model_training_mechanism_benchmark",
        decision=ranked[0].severity,
        decision_reasons=tuple(finding.reason for finding in ranked if finding.reason is not None),
        checks=tuple(finding.check for finding in findings),
    )


def _training_loss_fell(before: float | None, after: float | None, unit: str) -> _Finding:
    def found(held: bool | None, severity: _Severity, reason: str) -> _Finding:
        return _Finding(Check(name="training_loss_fell", before=before, after=after, held=held), severity, reason)

    if after is None or not math.isfinite(after):
        return found(False, "reject", f"The training loss after training is {_say(after)}.")
    if before is None:
        return found(None, "tune", f"There is no baseline to compare with: the training loss ended at {after:.4f}.")
    if not math.isfinite(before):
        return found(False, "reject", f"The training loss before training is {_say(before)}.")
    change = f"from {before:.4f} to {after:.4f} {unit}"
    if after < before:
        return found(True, "accept_mechanism", f"The training loss fell {change}.")
    return found(False, "tune", f"The training loss did not fall: it went {change}.")


def _evaluation_loss_finite(before: float | None, after: float | None, has_evaluation_set: bool) -> _Finding:
    def found(held: bool | None, severity: _Severity, reason: str | None) -> _Finding:
        return _Finding(Check(name="evaluation_loss_finite", before=before, after=after, held=held), severity, reason)

    if not has_evaluation_set:
        return found(None, "tune", "Nothing was held out, so learning cannot be told from memorising.")
    if after is None or not math.isfinite(after):
        return found(False, "reject", f"The held-out loss after training is {_say(after)}.")
    if before is not None and not math.isfinite(before):
        return found(False, "reject", f"The held-out loss before training is {_say(before)}.")
    return found(True, "accept_mechanism", None)


def _evaluation_loss_within_limit(before: float | None, after: float | None, limit: float, unit: str) -> _Finding:
    def found(held: bool | None, severity: _Severity, reason: str | None) -> _Finding:
        check = Check(name="evaluation_loss_within_limit", before=before, after=after, limit=limit, held=held)
        return _Finding(check, severity, reason)

    if after is None or not math.isfinite(after):
        return found(None, "tune", None)
    if before is None:
        return found(None, "tune", f"There is no held-out baseline to compare with: it ended at {after:.4f}.")
    if not math.isfinite(before):
        return found(None, "tune", None)
    numbers = f"{after - before:+.4f} {unit}, {before:.4f} to {after:.4f}; the gate allows {limit:+.4f}"
    if after > before + limit:
        return found(False, "reject", f"The held-out loss rose past its gate ({numbers}).")
    return found(True, "accept_mechanism", f"The held-out loss stayed within its gate ({numbers}).")


def _say(loss: float | None) -> str:
    return "missing" if loss is None else f"not finite ({loss})"
