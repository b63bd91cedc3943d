"""evidence.json: every field of the contract, the published schema, and contradictions that cannot be written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from example_runs import config, dry_run, evidence, failed_run, finished_run
from pydantic import ValidationError

from traceforge.evidence.recorder import RunRecorder
from traceforge.evidence.schema import Candidate, Evidence, Losses, json_schema, json_schema_text

PUBLISHED = Path(__file__).parents[3] / "docs" / "evidence.schema.json"

CONTRACT = {
    "": "schema_version run_mode run_label started finished total_s framework hardware model dataset workload baseline "
    "candidate mechanism_metrics monitor failure evidence_level decision",
    "framework": "python torch transformers",
    "model": "id requested_revision resolved_commit resolution_source content_hash",
    "dataset": "id requested_revision resolved_commit resolution_source train_ids_hash evaluation_ids_hash "
    "selection_seed",
    "workload": "id version train_rows evaluation_rows max_tokens samples_per_update updates learning_rate seed",
    "baseline": "name train_loss evaluation_loss",
    "candidate": "name train_loss evaluation_loss update_losses",
    "mechanism_metrics": "train_trained_tokens evaluation_trained_tokens cut_samples refused_samples median_tokens "
    "trainable_parameters trainable_share parameters_changed optimizer_state_entries scheduler_count median_update_ms "
    "p95_update_ms peak_allocated_bytes peak_reserved_bytes peak_host_bytes train_loss_decreased "
    "evaluation_loss_finite",
    "monitor": "mean_utilisation_percent peak_utilisation_percent mean_power_w peak_power_w peak_temperature_c "
    "peak_memory_bytes energy_j",
}


@pytest.mark.parametrize("make", [finished_run, failed_run, dry_run])
def test_every_run_writes_every_field_of_the_contract(make: Any, tmp_path: Path) -> None:
    written = json.loads((make(tmp_path) / "evidence.json").read_text())
    for part, fields in CONTRACT.items():
        assert not set(fields.split()) - set(written[part] if part else written), part


@pytest.mark.parametrize("make", [finished_run, failed_run, dry_run])
def test_every_written_evidence_fits_the_published_schema(make: Any, tmp_path: Path) -> None:
    written = json.loads((make(tmp_path) / "evidence.json").read_text())
    jsonschema.Draft202012Validator(
        json.loads(PUBLISHED.read_text()), format_checker=jsonschema.FormatChecker()
    ).validate(written)


def test_the_published_schema_is_the_one_of_the_models() -> None:
    assert PUBLISHED.read_text() == json_schema_text(), (
        "run `python -m traceforge.evidence.schema > docs/evidence.schema.json`"
    )


def test_the_published_schema_is_a_schema_that_requires_every_field() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for name, part in {"Evidence": schema, **schema["$defs"]}.items():
        assert sorted(part["required"]) == sorted(part["properties"]), name
        assert part["additionalProperties"] is False, name


def test_an_unknown_field_and_a_changed_one_are_refused() -> None:
    found = evidence(config(), dry_run=True)
    with pytest.raises(ValidationError, match="surprise"):
        Evidence.model_validate({**found.model_dump(), "surprise": 1})
    with pytest.raises(ValidationError, match="frozen"):
        found.decision = "accept_mechanism"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decision": "accept_mechanism"}, "cannot stand on evidence level"),
        ({"run_mode": "real"}, "cannot have evidence level"),
        (
            {"evidence_level": "failed_real_attempt", "decision": "reject_until_fixed", "run_mode": "real"},
            "contradicts",
        ),
        (
            {
                "evidence_level": "real_model_training_mechanism_benchmark",
                "decision": "accept_mechanism",
                "run_mode": "real",
            },
            "needs checks",
        ),
    ],
)
def test_a_decision_that_the_rest_contradicts_is_refused(change: dict[str, Any], words: str) -> None:
    plain = evidence(config(), dry_run=True).model_dump()
    with pytest.raises(ValidationError, match=words):
        Evidence.model_validate({**plain, **change})


def test_acceptance_with_a_check_that_did_not_hold_is_refused() -> None:
    good = evidence(
        config(),
        baseline=Losses(name="base", train_loss=2.0, evaluation_loss=2.0),
        candidate=Candidate(name="after", train_loss=1.0, evaluation_loss=1.0),
    )
    plain = good.model_dump()
    plain["checks"][0]["held"] = False
    with pytest.raises(ValidationError, match="each of them held"):
        Evidence.model_validate(plain)


def test_a_loss_that_is_not_finite_becomes_null_and_is_named(tmp_path: Path) -> None:
    broken = evidence(
        config(),
        baseline=Losses(name="base", train_loss=2.0, evaluation_loss=2.0),
        candidate=Candidate(name="after", train_loss=1.0, evaluation_loss=math.nan, update_losses=(1.0, math.inf)),
    )
    with RunRecorder(tmp_path) as recorder:
        written = json.loads(recorder.write_evidence(broken).read_text())
    assert written["decision"] == "reject"
    assert written["candidate"]["evaluation_loss"] is None
    assert written["candidate"]["update_losses"] == [1.0, None]
    assert written["non_finite"]["candidate.evaluation_loss"] == "nan"
    assert written["non_finite"]["candidate.update_losses[1]"] == "inf"
    jsonschema.Draft202012Validator(json_schema()).validate(written)
