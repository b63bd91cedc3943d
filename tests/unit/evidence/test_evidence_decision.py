"""The decision table, by hand."""

from __future__ import annotations

import math

import pytest

from traceforge.evidence.schema import Candidate, Failure, Losses, Verdict, decide

NAN, INF = math.nan, math.inf


def verdict(
    before: tuple[float | None, float | None],
    after: tuple[float | None, float | None],
    *,
    held_out: bool = True,
    limit: float = 0.05,
) -> Verdict:
    return decide(
        run_mode="real",
        failure=None,
        baseline=Losses(name="base", train_loss=before[0], evaluation_loss=before[1]),
        candidate=Candidate(name="after", train_loss=after[0], evaluation_loss=after[1]),
        has_evaluation_set=held_out,
        max_loss_increase=limit,
    )


@pytest.mark.parametrize(
    ("before", "after", "held_out", "decision"),
    [
        ((2.0, 2.1), (1.0, 1.5), True, "accept_mechanism"),
        ((2.0, 2.1), (1.0, 2.1), True, "accept_mechanism"),  # held-out loss need not fall
        ((2.0, 1.0), (1.0, 1.05), True, "accept_mechanism"),  # exactly at the gate
        ((2.0, 1.0), (1.0, 1.0501), True, "reject"),  # past it
        ((2.0, 2.1), (2.0, 2.1), True, "tune"),  # not fallen
        ((2.0, 2.1), (2.5, 2.1), True, "tune"),  # risen
        ((2.0, 2.1), (2.5, 2.9), True, "reject"),  # a broken gate outweighs it
        ((2.0, 2.1), (1.0, NAN), True, "reject"),
        ((2.0, 2.1), (1.0, INF), True, "reject"),
        ((2.0, 2.1), (1.0, None), True, "reject"),  # there is a set and it was not measured
        ((2.0, NAN), (1.0, 1.0), True, "reject"),
        ((NAN, 2.1), (1.0, 1.0), True, "reject"),
        ((2.0, 2.1), (NAN, 1.0), True, "reject"),
        ((2.0, 2.1), (None, 1.0), True, "reject"),
        ((None, None), (1.0, 1.0), True, "tune"),  # no baseline
        ((2.0, None), (1.0, 1.0), True, "tune"),  # no held-out baseline
        ((2.0, None), (1.0, None), False, "tune"),  # nothing held out
        ((2.0, None), (NAN, None), False, "reject"),
        ((None, None), (1.0, None), False, "tune"),
    ],
)
def test_a_real_run_is_decided_by_its_losses(
    before: tuple[float | None, float | None], after: tuple[float | None, float | None], held_out: bool, decision: str
) -> None:
    found = verdict(before, after, held_out=held_out)
    assert found.decision == decision
    assert found.evidence_level == "real_model_training_mechanism_benchmark"
    assert found.decision_reasons


def test_reasons_name_the_numbers_and_put_the_strongest_first() -> None:
    reasons = verdict((2.0, 1.0), (2.5, 1.25)).decision_reasons
    assert reasons[0] == (
        "The held-out loss rose past its gate (+0.2500 nats per token, 1.0000 to 1.2500; the gate allows +0.0500)."
    )
    assert reasons[1] == "The training loss did not fall: it went from 2.0000 to 2.5000 nats per token."


def test_without_a_held_out_set_the_reason_says_so() -> None:
    found = verdict((2.0, None), (1.0, None), held_out=False)
    assert found.decision_reasons[0] == "Nothing was held out, so learning cannot be told from memorising."
    assert {check.name: check.held for check in found.checks} == {
        "training_loss_fell": True,
        "evaluation_loss_finite": None,
        "evaluation_loss_within_limit": None,
    }


def test_the_checks_carry_the_numbers_of_the_gate() -> None:
    check = verdict((2.0, 1.0), (1.0, 1.02)).checks[-1]
    assert (check.name, check.before, check.after, check.limit, check.held) == (
        "evaluation_loss_within_limit",
        1.0,
        1.02,
        0.05,
        True,
    )


def test_a_failure_outweighs_good_losses() -> None:
    failure = Failure(stage="saving", error_type="StorageError", message="the disk is full")
    found = decide(
        run_mode="real",
        failure=failure,
        baseline=Losses(name="base", train_loss=2.0, evaluation_loss=2.0),
        candidate=Candidate(name="after", train_loss=1.0, evaluation_loss=1.0),
        has_evaluation_set=True,
        max_loss_increase=0.05,
    )
    assert (found.decision, found.evidence_level) == ("reject_until_fixed", "failed_real_attempt")
    assert found.decision_reasons == ("The run stopped at saving with StorageError: the disk is full",)


@pytest.mark.parametrize("failure", [None, Failure(stage="environment_preflight", error_type="X", message="no file")])
def test_a_dry_run_measures_nothing_even_when_it_fails(failure: Failure | None) -> None:
    found = decide(
        run_mode="dry_run",
        failure=failure,
        baseline=Losses(name="base"),
        candidate=Candidate(name="after"),
        has_evaluation_set=True,
        max_loss_increase=0.05,
    )
    assert (found.decision, found.evidence_level) == ("not_measured", "dry_run")
    assert ("no file" in found.decision_reasons[0]) is (failure is not None)
