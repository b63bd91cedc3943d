"""The pairs of a preference run: folders made by `traceforge build pairs`, tokenised, split by task, and described.

Split    As for samples (`separation.py`): by task, or a second source. No pair and no task is ever on both sides.
Groups   `data.group = "trajectory"`: what the build wrote, the trajectory that pairs fork from; `"none"`: each pair.
Cache    As for turns (`sample_cache.py`), a pair's sequences beside each other, so its prompt is stored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from traceforge.config import DataSettings
from traceforge.errors import ConfigError, InputError
from traceforge.samples.branches import Pair
from traceforge.samples.pair_references import PairFolder, open_pairs
from traceforge.samples.pair_rendering import check_pair_settings, cuts_of, render_pair
from traceforge.samples.pair_statistics import describe_pair_trees, describe_pairs
from traceforge.samples.refusal import Refusal
from traceforge.samples.render import TurnRenderer, default_system_prompt
from traceforge.samples.sample_cache import RefusedSample, RenderedFolder, cache_path, read_cache, write_cache
from traceforge.samples.separation import (
    LoadedSource,
    Provenance,
    describe_source,
    distinct_sources,
    identify,
    split_sources,
)
from traceforge.samples.sources import all_refused
from traceforge.samples.statistics import DatasetStatistics, RefusalTally, merge_refusals
from traceforge.samples.tokens import Sample

_CACHE_FORMAT = "traceforge-pair-cache/1"


@dataclass(frozen=True, slots=True)
class WeightedPairs:
    """The training pairs of one source; `weight` is how many times each group is seen in one pass."""

    path: str
    weight: float
    pairs: tuple[Pair, ...]

    @property
    def samples(self) -> tuple[Pair, ...]:
        """The pairs, under the name that `WeightedSamples` has: what draws groups for updates reads this."""
        return self.pairs


@dataclass(frozen=True, slots=True)
class PairSets:
    """What a preference run trains and measures. `evaluation` is empty if nothing is held out."""

    train: tuple[WeightedPairs, ...]
    evaluation: tuple[Pair, ...]
    statistics: DatasetStatistics


def load_pairs(settings: DataSettings, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None) -> PairSets:
    """Return the training and evaluation pairs of a run, tokenised, with their statistics.

    Every source is a folder made by `traceforge build pairs`. `data.max_tokens` bounds each sequence of a pair; a pair
    with a side that does not fit is refused unless `data.length_policy = "truncate_end"`.

    Raises:
        InputError: a source cannot be read, all of its pairs are refused, a set is left empty, or a pair or task is
            both trained and held out.
        ConfigError: settings that pairs cannot honour: `data.loss_on = "all"`, `data.length_policy = "drop_oldest"`,
            and those for row files and hub ids (`data.train_rows`, `data.evaluation_rows`, `data.revision`).
        TemplateError: the chat template fails altogether.
    """
    check_pair_settings(settings)
    _check_sources(settings)
    loader = _PairLoader(settings, tokenizer, template_kwargs)
    sources = [loader.load(entry.path) for entry in settings.train]
    measured = loader.load(settings.evaluation) if settings.evaluation is not None else None
    _check_ids(distinct_sources(sources, measured))
    train, evaluation = split_sources(settings, sources, measured)
    return PairSets(
        train=tuple(
            WeightedPairs(entry.path, entry.weight, _grouped(part, settings))
            for entry, part in zip(settings.train, train, strict=True)
        ),
        evaluation=_grouped(evaluation, settings),
        statistics=_describe(settings, tokenizer, sources, measured, (train, evaluation)),
    )


class _PairLoader:
    """Loads each folder once; the same path given twice is the same object."""

    def __init__(self, settings: DataSettings, tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> None:
        self._settings = settings
        self._renderer = TurnRenderer(tokenizer, settings, template_kwargs=template_kwargs)
        self._loaded: dict[str, LoadedSource[Pair]] = {}

    def load(self, path: str) -> LoadedSource[Pair]:
        """Return the pairs of one folder.

        Raises:
            InputError: it is no folder of pairs, or every pair was refused.
        """
        if path not in self._loaded:
            loaded = self._load(path, open_pairs(_folder(path)))
            if not loaded.samples:
                raise all_refused(loaded, self._settings)
            self._loaded[path] = loaded
        return self._loaded[path]

    def _load(self, path: str, folder: PairFolder) -> LoadedSource[Pair]:
        content_hash = f"{_CACHE_FORMAT}\n{folder.content_hash}"
        cached_at = cache_path(
            folder.folder, renderer_fingerprint=self._renderer.fingerprint, content_hash=content_hash
        )
        rendered = read_cache(cached_at)
        if rendered is None:
            rendered = _render(folder, self._renderer, self._settings)
            write_cache(cached_at, rendered)
        tally = RefusalTally()
        for refused in rendered.refused:
            tally.add(refused.code, refused.sample_id, refused.detail)
        return LoadedSource(
            path=path,
            kind="synthetic_pairs" if folder.is_synthetic else "pairs",
            samples=_pairs_of(folder, rendered.samples),
            held_out=(),
            task_ids=frozenset(reference.task_id for reference in folder.references),
            available=len(folder.references),
            examined=len(folder.references),
            refusals=tally.counts(),
            without_system=rendered.without_system,
            provenance=Provenance("local_hash", folder.content_hash),
        )


def _folder(path: str) -> Path:
    if Path(path).is_dir():
        return Path(path)
    if Path(path).exists():
        raise InputError(
            f"{path}: is a file, and preference pairs come from a folder",
            hint=f"run `traceforge build pairs {path} -o PAIRS` and pass PAIRS",
        )
    raise InputError(f"{path}: no such folder", hint="pass a folder made by `traceforge build pairs`")


def _check_sources(settings: DataSettings) -> None:
    given = {
        "data.train_rows": settings.train_rows,
        "data.evaluation_rows": settings.evaluation_rows,
        "data.revision": settings.revision,
    }
    unusable = [name for name, value in given.items() if value is not None]
    if unusable:
        raise ConfigError(
            f"{' and '.join(unusable)} {'is' if len(unusable) == 1 else 'are'} for row files and hub ids, and "
            "preference pairs come from folders",
            hint="leave them out; data.evaluation_fraction holds out tasks",
        )


def _render(folder: PairFolder, renderer: TurnRenderer, settings: DataSettings) -> RenderedFolder:
    """Render every pair; a sequence's group names pair and side by number until `_pairs_of` reads it."""
    samples: list[Sample] = []
    refused: list[RefusedSample] = []
    without_system: set[str] = set()
    for number, reference in enumerate(folder.references):
        sides = folder.sides(reference)
        made = render_pair(renderer, settings, reference, sides)
        if isinstance(made, Refusal):
            refused.append(RefusedSample(reference.pair_id, reference.task_id, made.code, made.detail))
            continue
        for side, members in (("chosen", made.chosen), ("rejected", made.rejected)):
            samples += [replace(sample, group_id=f"{number} {side}") for sample in members]
        if not any(message.role == "system" for message in sides[0].messages[: reference.prompt_messages]):
            without_system.add(reference.pair_id)
    return RenderedFolder(tuple(samples), tuple(refused), frozenset(without_system))


def _pairs_of(folder: PairFolder, samples: Sequence[Sample]) -> tuple[Pair, ...]:
    """Return the pairs that rendered sequences make up; each sequence gets its pair's group."""
    sides: dict[int, dict[str, list[Sample]]] = {}
    for sample in samples:
        number, side = sample.group_id.split(" ")
        reference = folder.references[int(number)]
        pair = sides.setdefault(int(number), {"chosen": [], "rejected": []})
        pair[side].append(replace(sample, group_id=reference.group))
    return tuple(
        Pair(
            pair_id=folder.references[number].pair_id,
            group_id=folder.references[number].group,
            task_id=folder.references[number].task_id,
            chosen=tuple(pair["chosen"]),
            rejected=tuple(pair["rejected"]),
            cuts=cuts_of((*pair["chosen"], *pair["rejected"])),
        )
        for number, pair in sides.items()
    )


def _check_ids(sources: Sequence[LoadedSource[Pair]]) -> None:
    """Refuse one id for two different pairs: reports, hashes and reference scores would name either."""
    seen: dict[str, tuple[Pair, str]] = {}
    for source in sources:
        for pair in source.samples:
            first, path = seen.setdefault(pair.pair_id, (pair, source.path))
            if first is not pair and not _same_pair(first, pair):
                raise InputError(
                    f"pair id {pair.pair_id!r} names two different pairs, in {path} and in {source.path}",
                    hint="rename one of the files the pairs were built from",
                )


def _same_pair(one: Pair, other: Pair) -> bool:
    sides = ((one.chosen, other.chosen), (one.rejected, other.rejected))
    return all(
        [sample.token_ids_S.tobytes() for sample in left] == [sample.token_ids_S.tobytes() for sample in right]
        for left, right in sides
    )


def _grouped(pairs: Iterable[Pair], settings: DataSettings) -> tuple[Pair, ...]:
    if settings.group == "trajectory":
        return tuple(pairs)
    return tuple(replace(pair, group_id=pair.pair_id) for pair in pairs)


def _describe(
    settings: DataSettings,
    tokenizer: Any,
    sources: Sequence[LoadedSource[Pair]],
    measured: LoadedSource[Pair] | None,
    sets: tuple[Sequence[Sequence[Pair]], Sequence[Pair]],
) -> DatasetStatistics:
    train, evaluation = sets
    described = [
        describe_source(source, entry.weight, "train", len(part))
        for source, entry, part in zip(sources, settings.train, train, strict=True)
    ]
    if measured is not None:
        described.append(describe_source(measured, 1.0, "evaluation", len(evaluation)))
    distinct = distinct_sources(sources, measured)
    without_system = {
        pair.pair_id for source in distinct for pair in source.samples if pair.pair_id in source.without_system
    }
    speaks = settings.rendering == "chat" and bool(without_system)
    default_prompt = default_system_prompt(tokenizer) if speaks else None
    identity = identify(sources, measured)
    train_statistics = describe_pairs(train)
    trained = [pair for part in train for pair in part]
    evaluation_statistics = describe_pairs([evaluation], train=trained) if evaluation else None
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
        train_trees=describe_pair_trees([_grouped(part, settings) for part in train], group=settings.group),
        sources=tuple(described),
        refusals=merge_refusals(source.refusals for source in distinct),
        default_system_prompt=default_prompt,
        samples_with_default_system_prompt=len(without_system) if default_prompt is not None else 0,
    )
