"""Labels: the shapes of SWE-bench files, and which trajectory each one is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trajectory_logs import ANSWER, BUNDLED, USER, ingested, mini_log, write_json, write_rows

from traceforge.errors import InputError
from traceforge.trajectories.outcomes import Verdict, is_crash, labels_in

V1, V2 = BUNDLED / "mini-swe-agent-v1", BUNDLED / "mini-swe-agent-v2"


def report(resolved: object, **more: Any) -> dict[str, Any]:
    return {
        "patch_is_None": False,
        "patch_exists": True,
        "patch_successfully_applied": True,
        "resolved": resolved,
        **more,
    }


def log(task: str, text: str = "Because.", *, exit_status: str = "Submitted") -> dict[str, Any]:
    held = mini_log([{"role": "assistant", "content": text}], version="mini-swe-agent-1", instance_id=task)
    held["info"]["exit_status"] = exit_status
    return held


def test_the_bundled_labels_reach_their_trajectories(tmp_path: Path) -> None:
    out = ingested([V1, V2], tmp_path / "out", labels=[V1 / "reports", V2 / "reports"])
    outcomes = {each.trajectory_id: each.outcome for each in out.trajectories}
    assert {name: outcome.resolved for name, outcome in outcomes.items()} == {
        "astropy__astropy-12907": True,
        "scikit-learn__scikit-learn-14141": True,
        "django__django-10973": False,
        "local": None,
        "github_issue": None,
    }
    assert str(outcomes["astropy__astropy-12907"].source).endswith("reports/astropy__astropy-12907.report.json")
    counts = out.manifest["counts"]
    assert (counts["resolved"], counts["unresolved"], counts["unlabelled"]) == (2, 1, 2)
    assert out.manifest["labels"]["matched"] == 3
    assert out.manifest["labels"]["trajectories_without_label"] == 2
    assert [each["labels"] for each in out.manifest["label_files"]] == [1, 1, 1]


def test_labels_among_the_inputs_are_counted_and_not_applied(tmp_path: Path) -> None:
    out = ingested(V2, tmp_path / "out")
    assert {each.outcome.resolved for each in out.trajectories} == {None}
    assert (out.summary.counts.side_files, out.reasons) == (2, [])


def test_a_flat_report_takes_its_id_from_its_name_or_its_folder() -> None:
    assert labels_in(report(True), "x/a__b-1.report.json") == [Verdict("a__b-1", True)]
    assert labels_in(report(True), "logs/a__b-1/report.json") == [Verdict("a__b-1", True)]
    assert labels_in(report(False), "logs/a__b-1.json") == [Verdict("a__b-1", False)]
    assert labels_in(report(False, instance_id="c__d-2"), "logs/a__b-1/report.json") == [Verdict("c__d-2", False)]


def test_a_keyed_report_may_hold_many(tmp_path: Path) -> None:
    held = {"a": report(True), "b": report(False, patch_successfully_applied=False)}
    assert labels_in(held, "report.json") == [Verdict("a", True), Verdict("b", False, "patch_does_not_apply")]


def test_run_summaries_old_and_new() -> None:
    new = {
        "total_instances": 6,
        "submitted_ids": ["a", "b", "c", "d"],
        "completed_ids": ["a", "b"],
        "resolved_ids": ["a"],
        "unresolved_ids": ["b"],
        "error_ids": ["c"],
        "empty_patch_ids": ["d"],
        "incomplete_ids": ["e"],
    }
    assert {each.instance_id: (each.resolved, each.reason) for each in labels_in(new, "") or []} == {
        "a": (True, None),
        "b": (False, None),
        "c": (None, "evaluation_failed"),
        "d": (False, "no_patch"),
        "e": (None, "not_evaluated"),
    }
    old = {"generated": ["a", "b", "c", "d"], "applied": ["a", "b", "d"], "no_apply": ["c"], "test_timeout": ["d"],
           "no_generation": ["e"], "resolved": ["a"]}  # fmt: skip
    assert {each.instance_id: (each.resolved, each.reason) for each in labels_in(old, "") or []} == {
        "a": (True, None),
        "b": (False, None),
        "c": (False, "patch_does_not_apply"),
        "d": (None, "evaluation_failed"),
        "e": (False, "no_patch"),
    }


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"resolved": True},
        {"a": {"resolved": True}},
        {"resolved": ["a"]},
        "x",
        {"a": 1, "b": report(True)},
        {"resolved": True, "patch_exists": True, "instance_id": "a", "response": {}},
    ],
)
def test_what_only_resembles_a_label_file_is_none(value: object) -> None:
    assert labels_in(value, "report.json") is None


@pytest.mark.parametrize(
    ("given", "exit_status", "resolved", "reason"),
    [
        (report(False, patch_is_None=True, patch_exists=False), "Submitted", False, "no_patch"),
        (report(False, patch_is_None=True, patch_exists=False), "LimitsExceeded", False, "no_patch"),
        (
            report(False, patch_is_None=True, patch_exists=False),
            "APIConnectionError",
            None,
            "no_patch_after_crash: APIConnectionError",
        ),
        (report(False), "APIConnectionError", False, None),
        (report(True), "APIConnectionError", True, None),
        (report(False, error_eval=True), "Submitted", None, "evaluation_failed"),
        (report(None), "Submitted", None, "evaluation_failed"),
    ],
)
def test_a_missing_patch_after_a_crash_says_nothing_about_the_agent(
    given: dict[str, Any], exit_status: str, resolved: bool | None, reason: str | None, tmp_path: Path
) -> None:
    path = write_json(tmp_path / "run.json", log("a__b-1", exit_status=exit_status))
    labels = write_json(tmp_path / "eval" / "a__b-1" / "report.json", given)
    (trajectory,) = ingested(path, tmp_path / "out", labels=[labels]).trajectories
    assert (trajectory.outcome.resolved, trajectory.outcome.reason) == (resolved, reason)


def test_clean_ends_are_no_crashes() -> None:
    assert not any(
        map(
            is_crash,
            [None, "", "Submitted", "submitted (exit_cost)", "LimitsExceeded", "TimeExceeded", "RepeatedFormatError"],
        )
    )
    assert all(map(is_crash, ["UserInterruption", "RuntimeError", "ContextWindowExceededError"]))


def test_the_label_nearest_to_a_run_speaks_for_it(tmp_path: Path) -> None:
    for run, resolved in (("one", True), ("two", False)):
        write_json(tmp_path / "runs" / run / "a__b-1" / "log.traj.json", log("a__b-1", run))
        write_json(tmp_path / "runs" / run / "eval" / "a__b-1.report.json", report(resolved))
    out = ingested(tmp_path / "runs", tmp_path / "out", labels=[tmp_path / "runs"])
    assert [(each.messages[2].content, each.outcome.resolved) for each in out.trajectories] == [
        ("one", True),
        ("two", False),
    ]
    assert out.manifest["labels"]["matched"] == 2


def test_a_label_speaks_only_for_the_run_it_is_nearest_to(tmp_path: Path) -> None:
    for run in ("one", "two"):
        write_json(tmp_path / "runs" / run / "log.json", log("a__b-1", run))
    label = write_json(tmp_path / "runs" / "two" / "eval" / "a__b-1.report.json", report(True))
    out = ingested(tmp_path / "runs", tmp_path / "out", labels=[label])
    first, second = (each.outcome for each in out.trajectories)
    assert (first.resolved, first.reason) == (None, "label_of_another_run")
    assert (second.resolved, second.reason) == (True, None)
    counts = out.manifest["counts"]
    assert (counts["resolved"], counts["unlabelled"]) == (1, 1)


def test_one_label_for_two_runs_labels_neither(tmp_path: Path) -> None:
    for run in ("one", "two", "three"):
        write_json(tmp_path / "runs" / run / "log.json", log("a__b-1" if run != "three" else "c__d-2", run))
    label = write_json(tmp_path / "summary.json", {"resolved_ids": ["a__b-1", "c__d-2"], "unresolved_ids": []})
    out = ingested(tmp_path / "runs", tmp_path / "out", labels=[label])
    by_run = {each.messages[2].content: each.outcome for each in out.trajectories}
    assert {run: (each.resolved, each.reason) for run, each in by_run.items()} == {
        "one": (None, "ambiguous_label"),
        "two": (None, "ambiguous_label"),
        "three": (True, None),
    }
    assert out.manifest["labels"]["ambiguous"] == 1
    counts = out.manifest["counts"]
    assert (counts["resolved"], counts["unresolved"], counts["unlabelled"]) == (1, 0, 2)


def test_two_files_of_one_folder_may_share_a_label_and_two_rows_may_not(tmp_path: Path) -> None:
    write_json(tmp_path / "files" / "a.json", log("a__b-1", "form one"))
    write_json(tmp_path / "files" / "b.json", log("a__b-1", "form two"))
    label = write_json(tmp_path / "a__b-1.report.json", report(True))
    out = ingested(tmp_path / "files", tmp_path / "1", labels=[label])
    assert [each.outcome.resolved for each in out.trajectories] == [True, True]
    assert out.manifest["labels"]["shared"] == 1
    rows = [{"messages": [USER, {**ANSWER, "content": text}], "instance_id": "a__b-1", "reward": 0.5} for text in "xy"]
    out = ingested(write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "2", labels=[label])
    assert [(each.outcome.resolved, each.outcome.reason, each.outcome.reward) for each in out.trajectories] == [
        (None, "ambiguous_label", 0.5)
    ] * 2


def test_labels_that_contradict_each_other_label_nothing(tmp_path: Path) -> None:
    path = write_json(tmp_path / "logs" / "run.json", log("a__b-1"))
    for name, resolved in (("x", True), ("y", False)):
        write_json(tmp_path / "eval" / name / "a__b-1.report.json", report(resolved))
    out = ingested(path, tmp_path / "out", labels=[tmp_path / "eval"])
    assert (out.trajectories[0].outcome.resolved, out.trajectories[0].outcome.reason) == (None, "contradictory_labels")
    assert (out.manifest["labels"]["contradictory"], out.manifest["labels"]["unmatched"]) == (1, 0)
    write_json(tmp_path / "eval" / "y" / "a__b-1.report.json", report(None))
    out = ingested(path, tmp_path / "out", labels=[tmp_path / "eval"])
    assert out.trajectories[0].outcome.resolved is True, "an evaluation that failed contradicts nobody"


def test_what_a_row_says_of_itself_stays_and_a_disagreement_is_counted(tmp_path: Path) -> None:
    row = {"messages": [USER, ANSWER], "instance_id": "a__b-1", "resolved": True}
    label = write_json(tmp_path / "a__b-1.report.json", report(False))
    out = ingested(write_rows(tmp_path / "rows.jsonl", row), tmp_path / "out", labels=[label])
    assert (out.trajectories[0].outcome.resolved, out.trajectories[0].outcome.source) == (True, "row:resolved")
    assert out.manifest["labels"]["disagree_with_log"] == 1


def test_labels_without_a_trajectory_are_counted_and_named(tmp_path: Path) -> None:
    path = write_json(tmp_path / "run.json", log("a__b-1"))
    label = write_json(tmp_path / "eval" / "report.json", {"a__b-1": report(True), "z__z-9": report(True)})
    out = ingested(path, tmp_path / "out", labels=[label])
    held = out.manifest["labels"]
    assert (held["labels"], held["matched"], held["unmatched"], held["unmatched_ids"]) == (2, 1, 1, ["z__z-9"])


def test_a_label_may_know_a_trajectory_by_its_file_name(tmp_path: Path) -> None:
    path = write_json(tmp_path / "run_7.traj.json", {**log("a__b-1"), "instance_id": "a__b-1"})
    label = write_json(tmp_path / "eval" / "run_7.report.json", report(True))
    assert ingested(path, tmp_path / "out", labels=[label]).trajectories[0].outcome.resolved is True


def test_folders_of_labels_may_hold_anything_but_a_named_file_must_be_one(tmp_path: Path) -> None:
    path = write_json(tmp_path / "run.json", log("a__b-1"))
    folder = tmp_path / "eval" / "a__b-1"
    write_json(folder / "report.json", {"a__b-1": report(True)})
    (folder / "test_output.txt").write_text("{ not JSON")
    (folder / "patch.diff").write_bytes(b"\xff\x00")
    write_json(folder / "other.json", {"a": 1})
    assert ingested(path, tmp_path / "out", labels=[tmp_path / "eval"]).trajectories[0].outcome.resolved is True
    for name in ("test_output.txt", "patch.diff", "other.json"):
        with pytest.raises(InputError, match=name):
            ingested(path, tmp_path / "out", labels=[folder / name])
    (tmp_path / "none").mkdir()
    write_json(tmp_path / "none" / "x.json", {"a": 1})
    with pytest.raises(InputError, match="no file here holds labels"):
        ingested(path, tmp_path / "out", labels=[tmp_path / "none"])
    with pytest.raises(InputError, match=r"gone\.json"):
        ingested(path, tmp_path / "out", labels=[tmp_path / "gone.json"])
