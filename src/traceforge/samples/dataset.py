"""The samples of a run: sources loaded, split into train and evaluation, checked for leaks, and described.

Split    By task over all training sources (`split.py`), or a second source, or rows chosen after the training rows.
         No sample and no task is ever on both sides.
Groups   `data.group` decides what an update never splits: a trajectory's turns, or nothing.
Order    Samples stay in file order (rows: in selection order). Drawing them for updates is the training's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from traceforge.config import DataSettings
from traceforge.errors import ConfigError, InputError
from traceforge.samples.hub_rows import is_hub_id
from traceforge.samples.render import default_system_prompt
from traceforge.samples.separation import LoadedSource, describe_source, distinct_sources, identify, split_sources
from traceforge.samples.sources import SourceLoader
from traceforge.samples.statistics import DatasetStatistics, describe_samples, describe_trees, merge_refusals
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
    train, evaluation = split_sources(settings, sources, measured)
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


def _check_ids(sources: Sequence[LoadedSource[Sample]]) -> None:
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


def _describe(
    settings: DataSettings,
    tokenizer: Any,
    sources: Sequence[LoadedSource[Sample]],
    measured: LoadedSource[Sample] | None,
    sets: tuple[Sequence[Sequence[Sample]], Sequence[Sample]],
) -> DatasetStatistics:
    train, evaluation = sets
    kept = [
        describe_source(source, entry.weight, "train", len(part))
        for source, entry, part in zip(sources, settings.train, train, strict=True)
    ]
    if measured is not None:
        kept.append(describe_source(measured, 1.0, "evaluation", len(evaluation)))
    distinct = distinct_sources(sources, measured)
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
    identity = identify(sources, measured)
    return DatasetStatistics(
        dataset_id=identity.dataset_id,
        requested_revision=identity.requested_revision,
        resolved_commit=identity.resolved_commit,
        resolution_source=identity.resolution_source,
        content_hash=identity.content_hash,
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


def _grouped(samples: Iterable[Sample], settings: DataSettings) -> tuple[Sample, ...]:
    if settings.group == "trajectory":
        return tuple(samples)
    return tuple(replace(sample, group_id=sample.sample_id) for sample in samples)
