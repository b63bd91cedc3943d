"""The samples of a run: sources loaded, split into train and evaluation, checked for leaks, and described.

Split    By task over all training sources (`split.py`), or a second source, or rows chosen after the training rows.
         No sample and no task is ever on both sides.
Groups   `data.group` decides what an update never splits: a trajectory's turns, or nothing.
Order    Samples stay in file order (rows: in selection order). Drawing them for updates is the training's part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from traceforge.config import DataSettings
from traceforge.errors import ConfigError, InputError
from traceforge.samples.hub_rows import is_hub_id
from traceforge.samples.render import default_system_prompt
from traceforge.samples.sources import LoadedSource, SourceLoader
from traceforge.samples.split import held_out_tasks
from traceforge.samples.statistics import (
    DatasetStatistics,
    SourceStatistics,
    describe_samples,
    describe_trees,
    merge_refusals,
)
from traceforge.samples.tokens import Sample


@dataclass(frozen=True, slots=True)
class WeightedSamples:
    """The training samples of one source; `weight` is how many times each group is seen in one pass."""

    path: str
    weight: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class SampleSets:
    """What a run trains and measures. `evaluation` is empty if nothing is held out."""

    train: tuple[WeightedSamples, ...]
    evaluation: tuple[Sample, ...]
    statistics: DatasetStatistics


def load_samples(
    settings: DataSettings, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None
) -> SampleSets:
    """Return the training and evaluation samples of a run, tokenised, with their statistics.

    Turns of a built folder are cached beside it (`sample_cache.py`).

    Raises:
        InputError: a source cannot be read, all of its samples are refused, a set is left empty, or a sample or task
            is both trained and held out.
        ConfigError: settings that these sources cannot honour.
        HubError: a hub id cannot be resolved or loaded.
        TemplateError: the chat template fails altogether.
    """
    _check_settings(settings)
    loader = SourceLoader(settings, tokenizer, template_kwargs)
    select = settings.train_rows is not None or settings.evaluation_rows is not None
    sources = [loader.load(entry.path, select=select) for entry in settings.train]
    measured = loader.load(settings.evaluation) if settings.evaluation is not None else None
    _check_ids([*sources, *([measured] if measured else [])])
    train, evaluation = _split(settings, sources, measured)
    _check_apart(train, evaluation)
    statistics = _describe(settings, tokenizer, sources, measured, (train, evaluation))
    return SampleSets(
        train=tuple(
            WeightedSamples(entry.path, entry.weight, _grouped(part, settings))
            for entry, part in zip(settings.train, train, strict=True)
        ),
        evaluation=_grouped(evaluation, settings),
        statistics=statistics,
    )


def _check_settings(settings: DataSettings) -> None:
    chosen = [
        name
        for name, given in (
            ("data.train_rows", settings.train_rows),
            ("data.evaluation_rows", settings.evaluation_rows),
        )
        if given is not None
    ]
    if chosen and len(settings.train) > 1:
        raise ConfigError(
            f"{' and '.join(chosen)} choose rows of one source, and data.train names {len(settings.train)}",
            hint="name one source, or leave the numbers out",
        )
    if settings.train_rows is not None and settings.evaluation_fraction > 0:
        raise ConfigError(
            f"data.train_rows = {settings.train_rows} asks for exactly so many training rows, and "
            f"data.evaluation_fraction = {settings.evaluation_fraction} would hold a part of them out",
            hint="use data.evaluation_rows instead of data.evaluation_fraction",
        )
    named = [entry.path for entry in settings.train] + ([settings.evaluation] if settings.evaluation else [])
    if settings.revision is not None and not any(is_hub_id(path) for path in named):
        raise ConfigError(
            f"data.revision = {settings.revision!r} is for hub ids, and no source is one: {', '.join(named)}",
            hint="leave data.revision out",
        )


def _split(
    settings: DataSettings, sources: Sequence[LoadedSource], measured: LoadedSource | None
) -> tuple[list[tuple[Sample, ...]], tuple[Sample, ...]]:
    if settings.evaluation_fraction > 0:
        tasks = (task for source in sources for task in source.task_ids)
        held = held_out_tasks(tasks, fraction=settings.evaluation_fraction, seed=settings.seed)
        train = [tuple(sample for sample in source.samples if sample.task_id not in held) for source in sources]
        evaluation = _unique(sample for source in sources for sample in source.samples if sample.task_id in held)
        _check_sides(settings, sources, train, evaluation, held)
        return train, evaluation
    train = [source.samples for source in sources]
    return train, measured.samples if measured is not None else sources[0].held_out


def _check_sides(
    settings: DataSettings,
    sources: Sequence[LoadedSource],
    train: Sequence[Sequence[Sample]],
    evaluation: Sequence[Sample],
    held: frozenset[str],
) -> None:
    """Refuse a split that leaves a side, or the training part of a source, without samples."""
    refusals = merge_refusals(source.refusals for source in sources)
    counts = ", ".join(f"{code} {refused.count}" for code, refused in refusals.items()) or "none"
    hint = "raise data.max_tokens, change data.evaluation_fraction, or choose another data.seed"
    if not evaluation:
        raise InputError(
            f"no sample of the {len(held)} held-out tasks ({', '.join(sorted(held)[:3])}…) is left; refused: {counts}",
            hint=hint,
        )
    for source, part in zip(sources, train, strict=True):
        if not part:
            raise InputError(
                f"{source.path}: all of its {len(source.samples)} samples belong to held-out tasks; "
                f"nothing of it would be trained. Refused: {counts}",
                hint=hint,
            )


def _check_ids(sources: Sequence[LoadedSource]) -> None:
    """Refuse one id for two different samples: references, hashes and reports would name either."""
    seen: dict[str, tuple[Sample, str]] = {}
    for source in {id(source): source for source in sources}.values():
        for sample in (*source.samples, *source.held_out):
            first, path = seen.setdefault(sample.sample_id, (sample, source.path))
            if first is not sample and not np.array_equal(first.token_ids_S, sample.token_ids_S):
                raise InputError(
                    f"sample id {sample.sample_id!r} names two different samples, in {path} and in {source.path}",
                    hint="rename one of the files" if source.kind != "turns" else "ingest both into one folder",
                )


def _check_apart(train: Sequence[Sequence[Sample]], evaluation: Sequence[Sample]) -> None:
    trained_ids = {sample.sample_id for part in train for sample in part}
    trained_tasks = {sample.task_id for part in train for sample in part}
    both_ids = [sample.sample_id for sample in evaluation if sample.sample_id in trained_ids]
    both_tasks = sorted({sample.task_id for sample in evaluation if sample.task_id in trained_tasks})
    if both_ids or both_tasks:
        what = f"{len(both_ids)} samples (first: {both_ids[0]})" if both_ids else "no sample"
        raise InputError(
            f"training and evaluation overlap: {what} and {len(both_tasks)} tasks (first: {both_tasks[0]}) are in both",
            hint="hold tasks out with data.evaluation_fraction, or take them out of one of the two sources",
        )


def _describe(
    settings: DataSettings,
    tokenizer: Any,
    sources: Sequence[LoadedSource],
    measured: LoadedSource | None,
    sets: tuple[Sequence[Sequence[Sample]], Sequence[Sample]],
) -> DatasetStatistics:
    train, evaluation = sets
    kept = [
        _describe_source(source, entry.weight, "train", len(part))
        for source, entry, part in zip(sources, settings.train, train, strict=True)
    ]
    if measured is not None:
        kept.append(_describe_source(measured, 1.0, "evaluation", len(evaluation)))
    distinct = list({source.path: source for source in [*sources, *([measured] if measured else [])]}.values())
    without_system = {
        sample.sample_id
        for source in distinct
        for sample in (*source.samples, *source.held_out)
        if sample.sample_id in source.without_system
    }
    speaks = settings.rendering == "chat" and bool(without_system)
    default_prompt = default_system_prompt(tokenizer) if speaks else None
    train_statistics = describe_samples(train)
    evaluation_statistics = (
        describe_samples([evaluation], train=[sample for part in train for sample in part]) if evaluation else None
    )
    named = list({source.path: source for source in sources}.values())
    hashes = [source.provenance.content_hash for source in distinct]
    return DatasetStatistics(
        dataset_id=" + ".join(source.path for source in named),
        requested_revision=_one_or_none(source.provenance.requested_revision for source in named),
        resolved_commit=_one_or_none(source.provenance.resolved_commit for source in named),
        resolution_source=_one_or_none(source.provenance.resolution_source for source in named) or "mixed",
        content_hash=hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest(),
        selection_seed=settings.seed,
        train_ids_hash=train_statistics.ids_hash,
        evaluation_ids_hash=evaluation_statistics.ids_hash if evaluation_statistics else None,
        train=train_statistics,
        evaluation=evaluation_statistics,
        train_trees=describe_trees([_grouped(part, settings) for part in train], group=settings.group),
        sources=tuple(kept),
        refusals=merge_refusals(source.refusals for source in distinct),
        default_system_prompt=default_prompt,
        samples_with_default_system_prompt=len(without_system) if default_prompt is not None else 0,
    )


def _describe_source(source: LoadedSource, weight: float, role: str, kept: int) -> SourceStatistics:
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


def _grouped(samples: Iterable[Sample], settings: DataSettings) -> tuple[Sample, ...]:
    if settings.group == "trajectory":
        return tuple(samples)
    return tuple(replace(sample, group_id=sample.sample_id) for sample in samples)


def _unique(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    return tuple({sample.sample_id: sample for sample in samples}.values())


def _one_or_none(values: Iterable[str | None]) -> str | None:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
