"""What the report says first: a decision, a failure or a check in plain words, and losses before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from traceforge.evidence.formats import NOT_RECORDED, change, change_percent, integer, loss, perplexity
from traceforge.evidence.run_record import EvaluationLine, RunRecord
from traceforge.evidence.schema import CheckName, Decision, Evidence, Stage

Tone = Literal["good", "caution", "bad", "quiet"]

MOST_EVALUATIONS = 40

STAGE_WORDS: dict[Stage, str] = {
    "environment_preflight": "checking the environment",
    "revision_resolution": "resolving revisions",
    "dataset_and_supervision": "preparing the samples",
    "model_loading_and_baseline": "loading the model and measuring the baseline",
    "effective_updates": "training",
    "paired_evaluation": "the evaluation after training",
    "saving": "saving",
}


@dataclass(frozen=True)
class Headline:
    """The decision in plain words."""

    tone: Tone
    symbol: str
    title: str
    meaning: str


_HEADLINES: dict[Decision, Headline] = {
    "accept_mechanism": Headline(
        "good",
        "✓",
        "Accepted: training did what it should",
        "The loss fell on the training samples and the held-out loss stayed within its gate. This is a statement about "
        "the mechanism on this data. It does not say that the model solves more tasks.",
    ),
    "tune": Headline(
        "caution",
        "↻",
        "Not accepted yet: tune it and run again",
        "Nothing broke, but what was measured does not carry an acceptance.",
    ),
    "reject": Headline("bad", "✕", "Rejected: a gate failed", "Do not use this adapter."),
    "reject_until_fixed": Headline(
        "bad", "✕", "Failed: nothing to accept", "The run stopped before it could be judged. Fix the cause, run again."
    ),
    "not_measured": Headline(
        "quiet",
        "○",
        "Dry run: nothing was measured",
        "The protocol below is what a real run of this file would carry out.",
    ),
}

_INTERRUPTED = "Somebody or something stopped the run before it could be judged. What it had saved is below."

_NO_EVIDENCE = Headline(
    "quiet",
    "?",
    "No decision: there is no evidence file",
    "The run is still going on, or it was killed before it could write evidence.json. Below is what it left.",
)


def headline(evidence: Evidence | None) -> Headline:
    """Return the decision in words; a failure says where it happened."""
    if evidence is None:
        return _NO_EVIDENCE
    found = _HEADLINES[evidence.decision]
    if evidence.decision == "reject_until_fixed" and evidence.failure is not None:
        if evidence.failure.error_type == "Interrupted":
            return Headline("caution", "‖", f"Interrupted while {_doing(evidence.failure.stage)}", _INTERRUPTED)
        return Headline(found.tone, found.symbol, f"Failed while {_doing(evidence.failure.stage)}", found.meaning)
    return found


def _doing(stage: Stage) -> str:
    words = STAGE_WORDS[stage]
    return f"running {words}" if words.startswith("the ") else words


def run_title(record: RunRecord) -> str:
    """Return the run's label, or its folder's name where there is no evidence."""
    return record.evidence.run_label if record.evidence is not None else record.folder.resolve().name


@dataclass(frozen=True)
class LossRow:
    """Baseline against candidate on one set. A loss that is not finite reads as what it was."""

    label: str
    trained_tokens: int | None
    before: str
    after: str
    change: str
    perplexity: str
    """exp(loss), before and after."""


@dataclass(frozen=True)
class CheckRow:
    """One check of the decision; `held` None = it could not be checked."""

    label: str
    before: str
    after: str
    change: str
    allowed: str
    held: bool | None


_CHECK_WORDS: dict[CheckName, tuple[str, str]] = {
    "training_loss_fell": ("Training loss fell", "below the baseline"),
    "evaluation_loss_finite": ("Held-out loss is finite", "any finite number"),
    "evaluation_loss_within_limit": ("Held-out loss within its gate", ""),
}


def loss_rows(evidence: Evidence) -> list[LossRow]:
    """Return the two rows of the loss table."""
    before, after, metrics = evidence.baseline, evidence.candidate, evidence.mechanism_metrics
    return [
        LossRow(
            label,
            tokens,
            _loss_at(evidence, f"baseline.{name}", getattr(before, name)),
            _loss_at(evidence, f"candidate.{name}", getattr(after, name)),
            _change_words(getattr(before, name), getattr(after, name)),
            f"{perplexity(getattr(before, name))} → {perplexity(getattr(after, name))}",
        )
        for label, name, tokens in (
            ("Training set", "train_loss", metrics.train_trained_tokens),
            ("Held-out set", "evaluation_loss", metrics.evaluation_trained_tokens),
        )
    ]


def check_rows(evidence: Evidence) -> list[CheckRow]:
    """Return the rows of the table of checks, in their order."""
    rows = []
    for number, check in enumerate(evidence.checks):
        label, allowed = _CHECK_WORDS[check.name]
        rows.append(
            CheckRow(
                label,
                _loss_at(evidence, f"checks[{number}].before", check.before),
                _loss_at(evidence, f"checks[{number}].after", check.after),
                _change_words(check.before, check.after),
                allowed if check.limit is None else f"at most {check.limit:+.4f}",
                check.held,
            )
        )
    return rows


def _loss_at(evidence: Evidence, path: str, value: float | None) -> str:
    was = evidence.non_finite.get(path)
    return loss(value) if was is None else f"not finite ({was})"


def _change_words(before: float | None, after: float | None) -> str:
    absolute, relative = change(before, after), change_percent(before, after)
    return f"{absolute} ({relative})" if relative else absolute


@dataclass(frozen=True)
class EvaluationRow:
    """Both sets at one update; None = this set was not measured then."""

    update: int
    train: EvaluationLine | None
    evaluation: EvaluationLine | None


def evaluation_rows(evaluations: Sequence[EvaluationLine]) -> list[EvaluationRow]:
    """Return one row per update, ascending. A set that was measured twice at one update shows the later line."""
    by_update: dict[int, dict[str, EvaluationLine]] = {}
    for line in evaluations:
        by_update.setdefault(line.update, {})[line.set] = line
    return [
        EvaluationRow(update, lines.get("train"), lines.get("evaluation"))
        for update, lines in sorted(by_update.items())
    ]


class PreferenceRow(NamedTuple):
    """One set at one moment: accuracy, margin, log-probabilities and lengths of both sides, as they are shown."""

    label: str
    updates: str
    values: tuple[str, ...]


def preference_rows(evaluations: Sequence[EvaluationLine]) -> list[PreferenceRow]:
    """Return each set's first and last measurement; none in an SFT run."""
    rows = []
    for name, label in (("train", "Training"), ("evaluation", "Held-out")):
        lines = [line for line in evaluations if line.set == name and line.margin is not None]
        for line in lines[:1] + lines[1:][-1:]:
            numbers = (line.margin, line.chosen_logp, line.rejected_logp, line.chosen_length, line.rejected_length)
            margin, *rest = (NOT_RECORDED if number is None else f"{number:,.4g}" for number in numbers)
            accuracy = NOT_RECORDED if line.accuracy is None else f"{line.accuracy:.0%}"
            rows.append(PreferenceRow(label, integer(line.update), (accuracy, margin, *rest)))
    return rows


def thinned(rows: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """Return at most `MOST_EVALUATIONS` rows, evenly spread, the first and the last among them."""
    if len(rows) <= MOST_EVALUATIONS:
        return list(rows)
    last = len(rows) - 1
    return [rows[round(number * last / (MOST_EVALUATIONS - 1))] for number in range(MOST_EVALUATIONS)]


def evaluation_words(line: EvaluationLine | None) -> str:
    """Return the loss of one evaluation; a line without one was measured and is not finite."""
    if line is None:
        return NOT_RECORDED
    return "not finite" if line.loss is None else loss(line.loss)
