"""Who solved its task: SWE-bench label files, and which trajectory each label is about.

Shapes     `report.json` keyed by instance id; the same report flat, its id taken from `<id>.report.json` or from the
           folder's name; run summaries (`resolved_ids`, …) and their older form (`resolved`, `applied`, …).
Matching   By trajectory id, file name or task id. A label is about one run. Where several runs of a task are ingested,
           the label file nearest to a trajectory (most folders shared) speaks for it, and a label speaks only for what
           is nearest to it. What stays ambiguous or contradictory labels nothing, and is counted.
Unknown    A missing patch after a crash, or an evaluation that failed, says nothing about the agent: resolved is None.
Own words  What a log says of itself stays; a label that disagrees is counted.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from traceforge.trajectories.record import Outcome

_REPORT_KEYS = frozenset(("patch_is_None", "patch_successfully_applied", "tests_status"))
_EVALUATION_FAULTS = ("error_eval", "test_timeout", "eval_timed_out")
_CLEAN_EXITS = ("submitted", "limitsexceeded", "timeexceeded", "repeatedformaterror")
_SUFFIXES = (".report.json", ".json")

# Lists of a run summary, the strongest last: (key, resolved, reason).
_SUMMARY: tuple[tuple[str, bool | None, str | None], ...] = (
    ("incomplete_ids", None, "not_evaluated"),
    ("error_ids", None, "evaluation_failed"),
    ("empty_patch_ids", False, "no_patch"),
    ("unresolved_ids", False, None),
    ("resolved_ids", True, None),
)
_OLD_SUMMARY: tuple[tuple[str, bool | None, str | None], ...] = (
    ("no_generation", False, "no_patch"),
    ("generated", False, None),
    ("no_apply", False, "patch_does_not_apply"),
    ("applied", False, None),
    ("install_fail", None, "evaluation_failed"),
    ("reset_failed", None, "evaluation_failed"),
    ("test_errored", None, "evaluation_failed"),
    ("test_timeout", None, "evaluation_failed"),
    ("resolved", True, None),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a label says of one instance; reason `no_patch` means that no patch was there to test."""

    instance_id: str
    resolved: bool | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Label:
    """A verdict and the file that gives it."""

    verdict: Verdict
    file: str
    folder: tuple[str, ...]


def labels_in(value: Any, file_name: str) -> list[Verdict] | None:
    """Return the verdicts in a parsed JSON value, or None if it is no label file.

    Args:
        value: the whole file.
        file_name: path of the file; a flat report holds no id, so its name or its folder's gives it.
    """
    if not isinstance(value, dict):
        return None
    if _is_report(value):
        stated = value.get("instance_id")
        return [_from_report(stated if isinstance(stated, str) else _id_from_path(Path(file_name)), value)]
    if isinstance(value.get("resolved_ids"), list):
        return _from_summary(value, _SUMMARY)
    if isinstance(value.get("resolved"), list) and any(
        isinstance(value.get(key), list) for key, _, _ in _OLD_SUMMARY[:4]
    ):
        return _from_summary(value, _OLD_SUMMARY)
    if value and all(_is_report(each) for each in value.values()):
        return [_from_report(instance_id, report) for instance_id, report in value.items()]
    return None


def _is_report(value: Any) -> bool:
    return isinstance(value, dict) and "resolved" in value and bool(_REPORT_KEYS & value.keys())


def _id_from_path(path: Path) -> str:
    if path.name == "report.json":
        return path.absolute().parent.name
    suffix = next((each for each in _SUFFIXES if path.name.endswith(each)), "")
    return path.name.removesuffix(suffix)


def _from_report(instance_id: str, report: dict[str, Any]) -> Verdict:
    resolved = report.get("resolved")
    if any(report.get(key) is True for key in _EVALUATION_FAULTS) or not isinstance(resolved, bool):
        return Verdict(instance_id, None, "evaluation_failed")
    if resolved:
        return Verdict(instance_id, True)
    if report.get("patch_is_None") is True or report.get("patch_exists") is False:
        return Verdict(instance_id, False, "no_patch")
    applied = report.get("patch_successfully_applied")
    return Verdict(instance_id, False, "patch_does_not_apply" if applied is False else None)


def _from_summary(value: dict[str, Any], lists: Iterable[tuple[str, bool | None, str | None]]) -> list[Verdict]:
    verdicts: dict[str, Verdict] = {}
    for key, resolved, reason in lists:
        held = value.get(key)
        for instance_id in held if isinstance(held, list) else ():
            if isinstance(instance_id, str):
                verdicts[instance_id] = Verdict(instance_id, resolved, reason)
    return list(verdicts.values())


def is_crash(exit_status: str | None) -> bool:
    """Whether a run ended by a fault of the machine or the harness and not by the agent's own doing."""
    return bool(exit_status) and not str(exit_status).lower().startswith(_CLEAN_EXITS)


def folder_of(path: str) -> tuple[str, ...]:
    """Return the folders that lead to a file, from the root."""
    return Path(os.path.abspath(path)).parent.parts


@dataclass(frozen=True, slots=True)
class Subject:
    """A trajectory that asks for its label.

    Args:
        number: its place in the output, from 0.
        names: ids a label may know it by, the most specific first.
        file: its source.
        exit_status: how the run ended.
    """

    number: int
    names: Sequence[str]
    file: str
    exit_status: str | None


@dataclass(frozen=True, slots=True)
class _Use:
    """A trajectory whose outcome a label decided."""

    number: int
    file: str
    label: Label
    reward: float | None

    def unlabelled(self, reason: str) -> Outcome:
        return _unlabelled(self.label, self.reward, reason)

    def num_shared_folders(self) -> int:
        return _num_shared(self.label.folder, folder_of(self.file))


@dataclass
class LabelCounts:
    """How labels and trajectories met.

    Args:
        labels: verdicts read, one per instance and file.
        matched: those that are the nearest for some trajectory.
        unmatched: the others; `unmatched_ids` names their instances.
        shared: labels that several files of one folder use.
        ambiguous: labels taken back, since two runs claim them.
        contradictory: trajectories whose nearest labels contradict each other.
        disagree_with_log: trajectories whose own outcome a label denies; the own one stays.
        trajectories_without_label: trajectories that no label names.
    """

    labels: int = 0
    matched: int = 0
    unmatched: int = 0
    shared: int = 0
    ambiguous: int = 0
    contradictory: int = 0
    disagree_with_log: int = 0
    trajectories_without_label: int = 0
    unmatched_ids: list[str] = field(default_factory=list)


class Labels:
    """All labels of an ingest. `outcome` answers at once; `corrections` knows better when every trajectory was seen."""

    def __init__(self, labels: Iterable[Label] = ()) -> None:
        self._labels: defaultdict[str, list[Label]] = defaultdict(list)
        for label in labels:
            self._labels[label.verdict.instance_id].append(label)
        self._uses: defaultdict[tuple[str, str], list[_Use]] = defaultdict(list)
        self._matched: set[tuple[str, str]] = set()
        self._counts: Counter[str] = Counter()
        self._without = 0

    def outcome(self, subject: Subject, own: Outcome) -> Outcome:
        """Return a trajectory's outcome: its own if its log states one, else what the nearest label says."""
        name = next((each for each in subject.names if each in self._labels), None)
        if name is None:
            self._without += 1
            return own
        here = folder_of(subject.file)
        candidates = self._labels[name]
        best = max(_num_shared(label.folder, here) for label in candidates)
        nearest = [label for label in candidates if _num_shared(label.folder, here) == best]
        said = {label.verdict.resolved for label in nearest}
        # An evaluation that failed does not contradict one that did not.
        known = said - {None} or said
        label = next(each for each in nearest if each.verdict.resolved in known)
        self._matched.update((name, each.file) for each in nearest)
        if own.resolved is not None:
            self._counts["disagree_with_log"] += known not in ({None}, {own.resolved})
            return own
        if len(known) > 1:
            self._counts["contradictory"] += 1
            return _unlabelled(label, own.reward, "contradictory_labels")
        self._uses[name, label.file].append(_Use(subject.number, subject.file, label, own.reward))
        return _judged(label, subject.exit_status, own.reward)

    def corrections(self) -> dict[int, Outcome]:
        """Return new outcomes, by number, for trajectories whose label proved to be about another run."""
        corrected: dict[int, Outcome] = {}
        for uses in self._uses.values():
            if len(uses) > 1:
                corrected.update(self._settle(uses))
        return corrected

    def _settle(self, uses: list[_Use]) -> dict[int, Outcome]:
        shared = [use.num_shared_folders() for use in uses]
        best = max(shared)
        near = [use for use, each in zip(uses, shared, strict=True) if each == best]
        refuted = {use.number: use.unlabelled("label_of_another_run") for use in uses}
        for use in near:
            del refuted[use.number]
        files = [use.file for use in near]
        # Two runs in two folders, or two rows of one file, cannot both be what was evaluated. Two files of one folder
        # may be one run in two forms.
        if len({folder_of(file) for file in files}) > 1 or len(set(files)) < len(files):
            self._counts["ambiguous"] += 1
            refuted |= {use.number: use.unlabelled("ambiguous_label") for use in near}
        elif len(near) > 1:
            self._counts["shared"] += 1
        return refuted

    def counts(self) -> LabelCounts:
        """Return the counts; call it after `corrections`."""
        every = [(name, label.file) for name, labels in self._labels.items() for label in labels]
        unmatched = [each for each in every if each not in self._matched]
        return LabelCounts(
            labels=len(every),
            matched=len(every) - len(unmatched),
            unmatched=len(unmatched),
            shared=self._counts["shared"],
            ambiguous=self._counts["ambiguous"],
            contradictory=self._counts["contradictory"],
            disagree_with_log=self._counts["disagree_with_log"],
            trajectories_without_label=self._without,
            unmatched_ids=sorted({name for name, _ in unmatched}),
        )


def _num_shared(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)


def _unlabelled(label: Label, reward: float | None, reason: str) -> Outcome:
    return Outcome(reward=reward, source=label.file, reason=reason)


def _judged(label: Label, exit_status: str | None, reward: float | None) -> Outcome:
    resolved, reason = label.verdict.resolved, label.verdict.reason
    if reason == "no_patch" and is_crash(exit_status):
        resolved, reason = None, f"no_patch_after_crash: {str(exit_status)[:80]}"
    return Outcome(resolved=resolved, reward=reward, source=label.file, reason=reason)
