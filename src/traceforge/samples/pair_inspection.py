"""What a model would see of a folder of preference pairs: numbers of the set, and both sides of one pair.

Here     What is shown. How, on a terminal and as a page: `pair_inspection_views.py`.
Scores   Mean log-probabilities need a model's weights, which this layer never loads: they are given, or not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from traceforge.config import DataSettings, DataSource
from traceforge.samples.branches import Pair
from traceforge.samples.inspection_parts import find_shown, length_histogram
from traceforge.samples.mask_view import Segment, mask_segments
from traceforge.samples.pair_loading import load_pairs
from traceforge.samples.pair_statistics import shared_prefix_tokens
from traceforge.samples.references import PAIRS
from traceforge.samples.statistics import DatasetStatistics
from traceforge.samples.text_overlap import common_prefix_length
from traceforge.samples.tokenizer import load_tokenizer
from traceforge.samples.tokens import Sample

Scores = Mapping[str, tuple[float, float]]
"""Mean log-probability of the chosen and the rejected branch, in nats per trained token, by pair id."""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A sequence behind the prompt. Turns whose sequences continue each other are shown as one."""

    sample_ids: tuple[str, ...]
    num_tokens: int
    num_trained_tokens: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class SideView:
    """One side of a pair. `num_trained_tokens` is the length of its branch."""

    num_trained_tokens: int
    cuts: tuple[str, ...]
    sequences: tuple[SequenceView, ...]
    mean_logp: float | None


class PairLine(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one pair: tokens, and the scores if there are any."""

    pair_id: str
    task_id: str
    shared_prefix_tokens: int
    chosen_tokens: int
    rejected_tokens: int
    sequence_tokens: int
    tree_tokens: int
    chosen_logp: float | None
    rejected_logp: float | None


@dataclass(frozen=True, slots=True)
class PairView:
    """The pair that is shown; `prompt` is the text that all of its sequences begin with."""

    index: int
    line: PairLine
    group_id: str
    cuts: tuple[str, ...]
    prompt: str
    chosen: SideView
    rejected: SideView


@dataclass(frozen=True, slots=True)
class PairInspection:
    """What `traceforge inspect` shows of a folder of pairs.

    Args:
        path: the folder.
        model: the model whose tokenizer and template it was rendered with.
        settings: the settings that decided lengths and masks.
        statistics: the numbers of the whole set; `statistics.train.pairs` is not None.
        histogram: `(from, to, sequences)` per bin of sequence lengths in tokens, both ends included.
        lines: the numbers of every pair, in file order.
        pair: the pair that is shown.
        whole_text: show all of the pair; else the terminal leaves out the middle of a long prompt.
        notes: why a run with these settings shares less than `tree_tokens` says.
    """

    path: str
    model: str
    settings: DataSettings
    statistics: DatasetStatistics
    histogram: tuple[tuple[int, int, int], ...]
    lines: tuple[PairLine, ...]
    pair: PairView
    whole_text: bool
    notes: tuple[str, ...] = ()

    @property
    def is_scored(self) -> bool:
        """Whether mean log-probabilities were given."""
        return any(line.chosen_logp is not None for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values: statistics, histogram, the numbers of every pair, and the pair shown with its runs."""
        pair = self.pair
        return {
            "path": self.path,
            "model": self.model,
            "settings": self.settings.model_dump(mode="json"),
            "statistics": self.statistics.as_dict(),
            "histogram": [{"from": low, "to": high, "sequences": count} for low, high, count in self.histogram],
            "notes": list(self.notes),
            "pairs": msgspec.to_builtins(self.lines),
            "pair": {
                "index": pair.index,
                **msgspec.to_builtins(pair.line),
                "group_id": pair.group_id,
                "cuts": list(pair.cuts),
                "prompt": pair.prompt,
                "chosen": _side_as_dict(pair.chosen),
                "rejected": _side_as_dict(pair.rejected),
            },
        }


def whole_set(settings: DataSettings, source: DataSource) -> DataSettings:
    """Return settings that take all of `source` for training, whatever these say about sources and held-out parts."""
    held_out = {"evaluation": None, "evaluation_fraction": 0.0, "evaluation_rows": None, "train_rows": None}
    return settings.model_copy(update={"train": (source,), "revision": None, **held_out})


def holds_pairs(path: str | Path) -> bool:
    """Whether a data set is a folder of pairs."""
    return (Path(path) / PAIRS).is_file()


def inspect_pairs(  # noqa: PLR0913 - what a run file would say, field by field
    path: str | Path,
    *,
    model: str,
    settings: DataSettings,
    template_kwargs: Mapping[str, Any] | None = None,
    template_file: Path | None = None,
    revision: str | None = None,
    sample: int | str | None = None,
    scores: Scores | None = None,
) -> PairInspection:
    """Return the numbers of a folder of pairs under a model's tokenizer, and both sides of one pair.

    The whole folder is inspected: whatever `settings` says about training sources and held-out parts is set aside.

    Args:
        path: a folder made by `traceforge build pairs`.
        model: folder or hub id of the model.
        settings: rendering, target, lengths and so on.
        template_kwargs: switches of the chat template.
        template_file: a chat template instead of the model's own.
        revision: hub models only.
        sample: index or id of the pair to show whole; None shows the first, with a long prompt cut short.
        scores: mean log-probabilities to show; a pair that is not among them has none.

    Raises:
        InputError: the folder cannot be read, every pair is refused, or there is no such pair.
        ConfigError: settings that pairs cannot honour.
        ModelError: the tokenizer cannot be loaded.
    """
    settings = whole_set(settings, DataSource(path=str(path), weight=1.0))
    tokenizer = load_tokenizer(model, revision=revision, template_file=template_file)
    sets = load_pairs(settings, tokenizer, template_kwargs=template_kwargs)
    pairs = sets.train[0].pairs
    index = find_shown([pair.pair_id for pair in pairs], 0 if sample is None else sample, path=str(path), noun="pair")
    lines = tuple(_line(pair, scores or {}) for pair in pairs)
    return PairInspection(
        path=str(path),
        model=model,
        settings=settings,
        statistics=sets.statistics,
        histogram=length_histogram([one.num_tokens for pair in pairs for one in pair.samples]),
        lines=lines,
        pair=_view(pairs[index], index, lines[index], tokenizer),
        whole_text=sample is not None,
    )


def continued(samples: Sequence[Sample]) -> list[tuple[tuple[str, ...], Sample]]:
    """Return the sequences of a side, those that only continue each other as one with all of their weights.

    A template that renders history as it rendered the turn gives one; one that drops old reasoning gives one a turn.
    """
    joined: list[tuple[tuple[str, ...], Sample]] = []
    for sample in samples:
        if joined:
            names, before = joined[-1]
            if np.array_equal(before.token_ids_S, sample.token_ids_S[: before.num_tokens]):
                weights_S = sample.weights_S.copy()
                weights_S[: before.num_tokens] += before.weights_S
                longer = Sample(sample.sample_id, sample.group_id, sample.task_id, sample.token_ids_S, weights_S)
                joined[-1] = ((*names, sample.sample_id), longer)
                continue
        joined.append(((sample.sample_id,), sample))
    return joined


def _view(pair: Pair, index: int, line: PairLine, tokenizer: Any) -> PairView:
    sides = [
        [(names, sample, mask_segments(sample, tokenizer)) for names, sample in continued(samples)]
        for samples in (pair.chosen, pair.rejected)
    ]
    # Every sequence begins with the prompt, which is not trained: it stands in each one's first run.
    contexts = [_first_context(segments) for side in sides for _, _, segments in side]
    prompt = contexts[0][: min(common_prefix_length(contexts[0], context) for context in contexts)]
    views = [
        SideView(
            num_trained_tokens=sum(sample.num_trained_tokens for sample in samples),
            cuts=tuple(dict.fromkeys(code for sample in samples for code in sample.cuts)),
            sequences=tuple(
                SequenceView(names, sample.num_tokens, sample.num_trained_tokens, _behind(segments, len(prompt)))
                for names, sample, segments in side
            ),
            mean_logp=logp,
        )
        for samples, side, logp in zip(
            (pair.chosen, pair.rejected), sides, (line.chosen_logp, line.rejected_logp), strict=True
        )
    ]
    return PairView(
        index=index,
        line=line,
        group_id=pair.group_id,
        cuts=pair.cuts,
        prompt=prompt,
        chosen=views[0],
        rejected=views[1],
    )


def _first_context(segments: Sequence[Segment]) -> str:
    return "" if segments[0]["trained"] else segments[0]["text"]


def _behind(segments: Sequence[Segment], num_characters: int) -> tuple[Segment, ...]:
    first, *others = segments
    rest: Segment = {**first, "text": first["text"][num_characters:]}
    return (rest, *others) if rest["text"] or rest["trained"] else tuple(others)


def _line(pair: Pair, scores: Scores) -> PairLine:
    chosen_logp, rejected_logp = scores.get(pair.pair_id, (None, None))
    return PairLine(
        pair_id=pair.pair_id,
        task_id=pair.task_id,
        shared_prefix_tokens=shared_prefix_tokens(pair),
        chosen_tokens=sum(sample.num_trained_tokens for sample in pair.chosen),
        rejected_tokens=sum(sample.num_trained_tokens for sample in pair.rejected),
        sequence_tokens=sum(sample.num_tokens for sample in pair.samples),
        tree_tokens=pair.num_tokens,
        chosen_logp=chosen_logp,
        rejected_logp=rejected_logp,
    )


def _side_as_dict(side: SideView) -> dict[str, Any]:
    return {
        "trained_tokens": side.num_trained_tokens,
        "mean_logp": side.mean_logp,
        "cuts": list(side.cuts),
        "sequences": [
            {
                "sample_ids": list(sequence.sample_ids),
                "tokens": sequence.num_tokens,
                "trained_tokens": sequence.num_trained_tokens,
                "segments": list(sequence.segments),
            }
            for sequence in side.sequences
        ],
    }
