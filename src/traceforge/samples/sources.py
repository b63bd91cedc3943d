"""One data source loaded: a built folder, a row file, or a hub data set, as tokenised samples with its provenance.

Groups   Here a group is always a trajectory (or a row); `dataset.py` sets the groups of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceforge.config import DataSettings
from traceforge.errors import ConfigError, InputError
from traceforge.samples.hub_rows import is_hub_id, load_hub_rows, resolve_commit
from traceforge.samples.references import BuiltFolder, open_built
from traceforge.samples.refusal import Refusal
from traceforge.samples.render import TurnRenderer
from traceforge.samples.row_files import RowFile, read_row_file
from traceforge.samples.row_samples import select_rows
from traceforge.samples.sample_cache import RefusedSample, RenderedFolder, cache_path, read_cache, write_cache
from traceforge.samples.separation import ItemT, LoadedSource, Provenance
from traceforge.samples.statistics import RefusalTally
from traceforge.samples.tokens import Sample


class SourceLoader:
    """Loads each source once; the same path given twice is the same object."""

    def __init__(self, settings: DataSettings, tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._renderer: TurnRenderer | None = None
        self._loaded: dict[tuple[str, bool], LoadedSource[Sample]] = {}

    def load(self, path: str, *, select: bool = False) -> LoadedSource[Sample]:
        """Return the source at `path`; with `select`, `data.train_rows` and `data.evaluation_rows` choose its rows.

        Raises:
            InputError: there is no such source, it cannot be read, or every sample of it was refused.
            ConfigError: a setting that this kind of source cannot honour.
            HubError: a hub id that cannot be resolved or loaded.
        """
        key = (path, select)
        if key not in self._loaded:
            loaded = self._load(path, select=select)
            if not loaded.samples:
                raise all_refused(loaded, self._settings)
            self._loaded[key] = loaded
        return self._loaded[key]

    def _load(self, path: str, *, select: bool) -> LoadedSource[Sample]:
        local = Path(path)
        if local.is_dir():
            if select:
                raise ConfigError(
                    f"data.train_rows and data.evaluation_rows choose rows of row files, {path} is a folder of turns",
                    hint="leave them out; data.evaluation_fraction holds out tasks",
                )
            return self._load_folder(path, open_built(local))
        if local.exists():
            rows = read_row_file(local)
            return self._load_rows(path, rows, Provenance("local_hash", rows.content_hash), select=select)
        if is_hub_id(path):
            requested = self._settings.revision
            commit = resolve_commit(path, requested)
            rows = load_hub_rows(path, commit)
            return self._load_rows(path, rows, Provenance("hub", rows.content_hash, requested, commit), select=select)
        raise InputError(
            f"{path}: no such file or folder",
            hint="pass a folder made by `traceforge build sft`, a .jsonl or .json file of rows, or a hub id",
        )

    def _load_folder(self, path: str, built: BuiltFolder) -> LoadedSource[Sample]:
        renderer = self._turn_renderer()
        cached_at = cache_path(built.folder, renderer_fingerprint=renderer.fingerprint, content_hash=built.content_hash)
        rendered = read_cache(cached_at)
        if rendered is None:
            rendered = _render(built, renderer)
            write_cache(cached_at, rendered)
        tally = RefusalTally()
        for refused in rendered.refused:
            tally.add(refused.code, refused.sample_id, refused.detail)
        return LoadedSource(
            path=path,
            kind="turns",
            samples=rendered.samples,
            held_out=(),
            task_ids=frozenset(ref.task_id for members in built.references.values() for ref in members),
            available=built.num_samples,
            examined=built.num_samples,
            refusals=tally.counts(),
            without_system=rendered.without_system,
            provenance=Provenance("local_hash", built.content_hash),
        )

    def _load_rows(self, path: str, rows: RowFile, provenance: Provenance, *, select: bool) -> LoadedSource[Sample]:
        selection = select_rows(
            rows,
            self._tokenizer,
            self._turn_renderer() if rows.form == "conversation" else None,
            self._settings,
            train_rows=self._settings.train_rows if select else None,
            evaluation_rows=self._settings.evaluation_rows if select else None,
        )
        without_system = frozenset(
            rows.row_id(index)
            for index, row in enumerate(rows.rows)
            if rows.form == "conversation" and not any(message.get("role") == "system" for message in row["prompt"])
        )
        return LoadedSource(
            path=path,
            kind=rows.form,
            samples=selection.train,
            held_out=selection.evaluation,
            task_ids=frozenset(rows.row_id(index) for index in range(len(rows.rows))),
            available=len(rows.rows),
            examined=selection.examined,
            refusals=selection.refusals,
            without_system=without_system,
            provenance=provenance,
        )

    def _turn_renderer(self) -> TurnRenderer:
        # Made when first needed: rows of plain strings need no chat template, and a tokenizer may have none.
        if self._renderer is None:
            self._renderer = TurnRenderer(self._tokenizer, self._settings, template_kwargs=self._template_kwargs)
        return self._renderer


def _render(built: BuiltFolder, renderer: TurnRenderer) -> RenderedFolder:
    samples: list[Sample] = []
    refused: list[RefusedSample] = []
    without_system: set[str] = set()
    for trajectory, references in built.trajectories():
        has_system = any(message.role == "system" for message in trajectory.messages)
        for reference in references:
            made = renderer.render(trajectory, reference.message_index, group_id=reference.trajectory_id)
            if isinstance(made, Refusal):
                refused.append(RefusedSample(reference.sample_id, reference.task_id, made.code, made.detail))
                continue
            assert made.sample_id == reference.sample_id, (made.sample_id, reference.sample_id)
            samples.append(made)
            if not has_system:
                without_system.add(reference.sample_id)
    return RenderedFolder(tuple(samples), tuple(refused), frozenset(without_system))


def all_refused(loaded: LoadedSource[ItemT], settings: DataSettings) -> InputError:
    """Return the error for a source that gives no sample: the count and first detail of each reason, and a way out."""
    reasons = "; ".join(
        f"{code} {refused.count} (first: {refused.examples[0]}: {refused.detail})"
        for code, refused in loaded.refusals.items()
    )
    ways = {
        "too_long": f"raise data.max_tokens ({settings.max_tokens})"
        + (
            f" or lower data.observation_limit_tokens ({settings.observation_limit_tokens})"
            if settings.length_policy == "shorten_observations" and loaded.kind in {"turns", "pairs"}
            else ", or set data.length_policy"
        ),
        "nothing_trained": f"raise data.max_tokens ({settings.max_tokens}): the prompt alone fills it",
        "template_error": "the reason is the chat template's own message; see model.template_file",
    }
    most_first = sorted(loaded.refusals, key=lambda code: -loaded.refusals[code].count)
    return InputError(
        f"{loaded.path}: every one of {loaded.examined} {loaded.noun}s was refused: {reasons}",
        hint=next((ways[code] for code in most_first if code in ways), None),
    )
