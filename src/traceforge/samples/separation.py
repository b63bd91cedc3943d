"""The two sides of a run, training and evaluation: put apart by task, checked for leaks, and identified.

Of       Samples or preference pairs; all that is asked of either is an id, a task and a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from traceforge.config import DataSettings
from traceforge.errors import InputError
from traceforge.samples.branches import Pair
from traceforge.samples.split import held_out_tasks
from traceforge.samples.statistics import RefusalCount, SourceStatistics, merge_refusals
from traceforge.samples.tokens import Sample

ItemT = TypeVar("ItemT", bound=Sample | Pair)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the bytes came from, in the fields of evidence."""

    resolution_source: str
    content_hash: str
    requested_revision: str | None = None
    resolved_commit: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedSource(Generic[ItemT]):
    """One source after tokenising.

    Args:
        path: as given in the settings.
        kind: `turns`, the form of the rows, `pairs`, or `synthetic_pairs`.
        samples: those to train on (or to evaluate on, for a source of its own).
        held_out: rows held out by `data.evaluation_rows`.
        task_ids: every task of the source, those of refused samples too: the split must not depend on the model.
        available: samples or rows the source names.
        examined: how many of them were rendered or tokenised.
        refusals: by reason.
        without_system: ids of samples whose history has no system message.
        provenance: which bytes.
    """

    path: str
    kind: str
    samples: tuple[ItemT, ...]
    held_out: tuple[ItemT, ...]
    task_ids: frozenset[str]
    available: int
    examined: int
    refusals: dict[str, RefusalCount]
    without_system: frozenset[str]
    provenance: Provenance

    @property
    def noun(self) -> str:
        """What one of `samples` is called."""
        return "pair" if self.kind.endswith("pairs") else "sample"


@dataclass(frozen=True, slots=True)
class SetsIdentity:
    """What the sources are together, in the fields of evidence; a field on which they differ is None or `mixed`."""

    dataset_id: str
    requested_revision: str | None
    resolved_commit: str | None
    resolution_source: str
    content_hash: str


def split_sources(
    settings: DataSettings, sources: Sequence[LoadedSource[ItemT]], measured: LoadedSource[ItemT] | None
) -> tuple[list[tuple[ItemT, ...]], tuple[ItemT, ...]]:
    """Return the training part of each source, and the evaluation set.

    Raises:
        InputError: a side, or the training part of a source, is left empty, or both sides share an id or a task.
    """
    if settings.evaluation_fraction > 0:
        tasks = (task for source in sources for task in source.task_ids)
        held = held_out_tasks(tasks, fraction=settings.evaluation_fraction, seed=settings.seed)
        train = [tuple(item for item in source.samples if item.task_id not in held) for source in sources]
        evaluation = _unique(item for source in sources for item in source.samples if item.task_id in held)
        _check_sides(sources, train, evaluation, held)
    else:
        train = [source.samples for source in sources]
        evaluation = measured.samples if measured is not None else sources[0].held_out
    _check_apart(train, evaluation, sources[0].noun)
    return train, evaluation


def describe_source(source: LoadedSource[ItemT], weight: float, role: str, kept: int) -> SourceStatistics:
    """Return what the statistics say of one entry of `data.train`, or of `data.evaluation`."""
    return SourceStatistics(
        path=source.path,
        role=role,
        kind=source.kind,
        weight=weight,
        available=source.available,
        examined=source.examined,
        kept=kept,
        refusals=source.refusals,
        requested_revision=source.provenance.requested_revision,
        resolved_commit=source.provenance.resolved_commit,
        resolution_source=source.provenance.resolution_source,
        content_hash=source.provenance.content_hash,
    )


def distinct_sources(
    sources: Sequence[LoadedSource[ItemT]], measured: LoadedSource[ItemT] | None
) -> list[LoadedSource[ItemT]]:
    """Return each source once, the evaluation source last."""
    distinct: dict[str, LoadedSource[ItemT]] = {source.path: source for source in sources}
    if measured is not None:
        distinct.setdefault(measured.path, measured)
    return [*distinct.values()]


def identify(sources: Sequence[LoadedSource[ItemT]], measured: LoadedSource[ItemT] | None) -> SetsIdentity:
    """Return what the sources are together."""
    named = distinct_sources(sources, None)
    hashes = [source.provenance.content_hash for source in distinct_sources(sources, measured)]
    return SetsIdentity(
        dataset_id=" + ".join(source.path for source in named),
        requested_revision=_one_or_none(source.provenance.requested_revision for source in named),
        resolved_commit=_one_or_none(source.provenance.resolved_commit for source in named),
        resolution_source=_one_or_none(source.provenance.resolution_source for source in named) or "mixed",
        content_hash=hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest(),
    )


def _check_sides(
    sources: Sequence[LoadedSource[ItemT]],
    train: Sequence[Sequence[ItemT]],
    evaluation: Sequence[ItemT],
    held: frozenset[str],
) -> None:
    """Refuse a split that leaves a side, or the training part of a source, with nothing in it."""
    refusals = merge_refusals(source.refusals for source in sources)
    counts = ", ".join(f"{code} {refused.count}" for code, refused in refusals.items()) or "none"
    hint = "raise data.max_tokens, change data.evaluation_fraction, or choose another data.seed"
    if not evaluation:
        raise InputError(
            f"no {sources[0].noun} of the {len(held)} held-out tasks ({', '.join(sorted(held)[:3])}…) is left; "
            f"refused: {counts}",
            hint=hint,
        )
    for source, part in zip(sources, train, strict=True):
        if not part:
            raise InputError(
                f"{source.path}: all of its {len(source.samples)} {source.noun}s belong to held-out tasks; "
                f"nothing of it would be trained. Refused: {counts}",
                hint=hint,
            )


def _check_apart(train: Sequence[Sequence[ItemT]], evaluation: Sequence[ItemT], noun: str) -> None:
    trained_ids = {item.sample_id for part in train for item in part}
    trained_tasks = {item.task_id for part in train for item in part}
    both_ids = [item.sample_id for item in evaluation if item.sample_id in trained_ids]
    both_tasks = sorted({item.task_id for item in evaluation if item.task_id in trained_tasks})
    if both_ids or both_tasks:
        what = f"{len(both_ids)} {noun}s (first: {both_ids[0]})" if both_ids else f"no {noun}"
        raise InputError(
            f"training and evaluation overlap: {what} and {len(both_tasks)} tasks (first: {both_tasks[0]}) are in both",
            hint="hold tasks out with data.evaluation_fraction, or take them out of one of the two sources",
        )


def _unique(items: Iterable[ItemT]) -> tuple[ItemT, ...]:
    return tuple({item.sample_id: item for item in items}.values())


def _one_or_none(values: Iterable[str | None]) -> str | None:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
