"""The pairs of a preference run: folders made by `traceforge build pairs`, tokenised, split by task, and described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traceforge.config import DataSettings
from traceforge.samples.branches import Pair
from traceforge.samples.statistics import DatasetStatistics


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


def load_pairs(
    settings: DataSettings, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None
) -> PairSets:
    """Return the training and evaluation pairs of a run, tokenised, with their statistics.

    Every source is a folder made by `traceforge build pairs`. `data.max_tokens` bounds each sequence of a pair; a pair
    with a side that does not fit is refused unless `data.length_policy = "truncate_end"`. `data.group = "trajectory"`
    makes the trajectory that pairs fork from their group, `"none"` makes each pair its own.

    Raises:
        InputError: a source cannot be read, all of its pairs are refused, a set is left empty, or a pair or task is
            both trained and held out.
        ConfigError: settings that pairs cannot honour (`data.loss_on = "all"`, `data.length_policy = "drop_oldest"`,
            `data.train_rows`, `data.evaluation_rows`, `data.revision`).
        TemplateError: the chat template fails altogether.
    """
    raise NotImplementedError
