"""`traceforge inspect`: what a model would see of a data set: numbers, prefix trees, and one sample's own text.

Here     What is shown. How, on a terminal, in a pipe and as a page: `inspection_views.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from traceforge.config import DataSettings, DataSource, RunConfig
from traceforge.errors import UsageError
from traceforge.run_files import load_run_file, parse_run
from traceforge.samples.dataset import load_samples
from traceforge.samples.fork_causes import explain_forks
from traceforge.samples.inspection_parts import find_shown, length_histogram
from traceforge.samples.inspection_views import print_inspection, raw_text, write_inspection_html
from traceforge.samples.mask_view import Segment, mask_segments
from traceforge.samples.model_shape import read_model_shape
from traceforge.samples.pair_inspection import PairInspection, Scores, holds_pairs, inspect_pairs
from traceforge.samples.pair_inspection_views import print_pair_inspection, write_pair_inspection_html
from traceforge.samples.references import open_built
from traceforge.samples.statistics import DatasetStatistics
from traceforge.samples.tokenizer import load_tokenizer
from traceforge.samples.tokens import IntArray, Sample
from traceforge.samples.tree_report import TreeReport, grouped, report_trees
from traceforge.trajectories.record import Trajectory


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample of the data set; `segments` joined are its text as the model sees it."""

    index: int
    sample_id: str
    task_id: str
    num_tokens: int
    num_trained_tokens: int
    cuts: tuple[str, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `traceforge inspect` shows.

    Args:
        path: the data set.
        model: the model whose tokenizer and template it was rendered with.
        settings: the settings that decided lengths and masks.
        statistics: the numbers of the whole set.
        histogram: `(from, to, samples)` per bin of sample lengths in tokens, both ends included.
        trees: what its prefix trees save and why sharing breaks; of the trajectory of `sample`, the tree itself.
        sample: the sample that is shown.
        whole_text: show all of the sample; else the terminal leaves out the middle of long context.
        notes: why a run with these settings computes something else than `trees` says.
    """

    path: str
    model: str
    settings: DataSettings
    statistics: DatasetStatistics
    histogram: tuple[tuple[int, int, int], ...]
    trees: TreeReport
    sample: SampleView
    whole_text: bool
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values: statistics, histogram, trees and the sample with its runs."""
        return {
            "path": self.path,
            "model": self.model,
            "settings": self.settings.model_dump(mode="json"),
            "statistics": self.statistics.as_dict(),
            "histogram": [{"from": low, "to": high, "samples": count} for low, high, count in self.histogram],
            "trees": {**self.trees.as_dict(), "notes": list(self.notes)},
            "sample": {
                "index": self.sample.index,
                "sample_id": self.sample.sample_id,
                "task_id": self.sample.task_id,
                "tokens": self.sample.num_tokens,
                "trained_tokens": self.sample.num_trained_tokens,
                "cuts": list(self.sample.cuts),
                "segments": list(self.sample.segments),
            },
        }


def inspection_settings(
    dataset: str, *, model: str, run_file: Path | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Return the settings to inspect with.

    Args:
        run_file: take `[data]` and `[model]` settings from here; `model` and `dataset` still decide what is shown.
        overrides: `section.field=value`, as for a run file.

    Raises:
        ConfigError: the run file or an override is wrong.
    """
    if run_file is None:
        start = {"model": {"name_or_path": model}, "data": {"train": dataset}}
        return parse_run(start, source="inspect", overrides=overrides)
    config = load_run_file(run_file, overrides)
    if config.model.name_or_path == model:
        return config
    return config.model_copy(
        update={"model": config.model.model_copy(update={"name_or_path": model, "revision": None})}
    )


def run_inspect(
    dataset: str,
    config: RunConfig,
    *,
    sample: str | None = None,
    html: Path | None = None,
    raw: bool = False,
    as_json: bool = False,
    scores: Scores | None = None,
) -> None:
    """Inspect and show: on stdout as text, as JSON or as the sample's text alone; with `html` as a page, too.

    Args:
        config: see `inspection_settings`.
        raw: only the sample's text, verbatim; not of pairs.
        scores: of pairs, mean log-probabilities to show.

    Raises:
        UsageError: `raw` of a pair.
        InputError, ModelError, HubError, StorageError: see `inspect_dataset` and `write_inspection_html`.
    """
    given: dict[str, Any] = {
        "model": config.model.name_or_path,
        "settings": config.data,
        "template_kwargs": config.model.template_kwargs,
        "template_file": config.model.template_file,
        "revision": config.model.revision,
        "sample": sample,
    }
    shown: Inspection | PairInspection
    if holds_pairs(dataset):
        if raw:
            raise UsageError(
                "--raw prints one sequence, and a pair has one for each trained turn of both sides",
                hint="--json has the text of each",
            )
        shown = replace(inspect_pairs(dataset, **given, scores=scores), notes=_notes(config, of_pairs=True))
        write_page, show = partial(write_pair_inspection_html, shown), partial(print_pair_inspection, shown)
    else:
        inspection = inspect_dataset(dataset, **given, tokens_per_row=config.tokens_per_row)
        shown = replace(inspection, notes=_notes(config))
        write_page, show = partial(write_inspection_html, shown), partial(print_inspection, shown)
    if html is not None:
        write_page(html)
        sys.stderr.write(f"page: {html}\n")
    if as_json:
        sys.stdout.write(json.dumps(shown.as_dict(), ensure_ascii=False, indent=2) + "\n")
    elif isinstance(shown, Inspection) and raw:
        sys.stdout.write(raw_text(shown))
    else:
        show(Console())


def inspect_dataset(  # noqa: PLR0913 - what a run file would say, field by field
    path: str | Path,
    *,
    model: str,
    settings: DataSettings,
    template_kwargs: Mapping[str, Any] | None = None,
    template_file: Path | None = None,
    revision: str | None = None,
    sample: int | str | None = None,
    tokens_per_row: int | None = None,
) -> Inspection:
    """Return the numbers of a data set under a model's tokenizer, its prefix trees, and one sample of it.

    The whole data set is inspected: whatever `settings` says about training sources and held-out parts is set aside.

    Args:
        path: a folder made by `traceforge build sft`, a row file, or a hub id.
        model: folder or hub id of the model.
        settings: rendering, target, lengths and so on.
        template_kwargs: switches of the chat template.
        template_file: a chat template instead of the model's own.
        revision: hub models only.
        sample: index or id of the sample to show whole; None shows the first, with long context left out.
        tokens_per_row: longest row; None is the default of a run, twice `settings.max_tokens`.

    Raises:
        InputError: the data set cannot be read, every sample is refused, or there is no such sample.
        ModelError: the tokenizer cannot be loaded.
    """
    held_out = {"evaluation": None, "evaluation_fraction": 0.0, "evaluation_rows": None, "train_rows": None}
    settings = settings.model_copy(update={"train": (DataSource(path=str(path), weight=1.0),), **held_out})
    tokenizer = load_tokenizer(model, revision=revision, template_file=template_file)
    sets = load_samples(settings, tokenizer, template_kwargs=template_kwargs)
    samples = sets.train[0].samples
    ids = [one.sample_id for one in samples]
    index = find_shown(ids, 0 if sample is None else sample, path=str(path), noun="sample")
    chosen = samples[index]
    groups = grouped(replace(one, group_id=_trajectory_id(one, path)) for one in samples)

    def decode(token_ids: IntArray) -> str:
        text: str = tokenizer.decode(token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    return Inspection(
        path=str(path),
        model=model,
        settings=settings,
        statistics=sets.statistics,
        histogram=length_histogram([one.num_tokens for one in samples]),
        trees=report_trees(
            groups,
            explain_forks(groups, _trajectories(path, groups), decode, transcript=settings.rendering == "transcript"),
            tokens_per_row=tokens_per_row or 2 * settings.max_tokens,
            drawn=_trajectory_id(chosen, path),
            shape=read_model_shape(model, revision=revision),
        ),
        sample=SampleView(
            index=index,
            sample_id=chosen.sample_id,
            task_id=chosen.task_id,
            num_tokens=chosen.num_tokens,
            num_trained_tokens=chosen.num_trained_tokens,
            cuts=chosen.cuts,
            segments=tuple(mask_segments(chosen, tokenizer)),
        ),
        whole_text=sample is not None,
    )


def _trajectory_id(sample: Sample, path: str | Path) -> str:
    """Return the trajectory of a turn, also where `data.group` keeps turns apart; a row is one of its own."""
    return sample.sample_id.rpartition("#")[0] if Path(path).is_dir() else sample.sample_id


def _trajectories(path: str | Path, groups: Mapping[str, Sequence[Sample]]) -> Iterator[Trajectory]:
    """Yield the records of a built folder if any has two samples; rows of a file have no records."""
    if any(len(members) > 1 for members in groups.values()):
        for trajectory, _ in open_built(Path(path)).trajectories():
            yield trajectory


def _notes(config: RunConfig, *, of_pairs: bool = False) -> tuple[str, ...]:
    """Return why a run of these settings does not compute the trees of its trajectories, or of its pairs."""
    notes = []
    if config.data.group == "none" and not of_pairs:
        notes.append('data.group = "none": an update holds turns of any trajectories, which share less')
    if config.adapter.dropout:
        notes.append(f"adapter.dropout = {config.adapter.dropout}: samples cannot share computation")
    if config.model.attention in {"plain", "packed"}:
        notes.append(f'model.attention = "{config.model.attention}": samples run apart')
    return tuple(notes)
