"""Rows: what the model runs over in one pass. A row is a forest of paths laid side by side in one sequence.

A *path* is one contiguous range of the row. It continues from its *parent token*, another position of the same row, or
starts a tree of its own. What a token sees is its own path up to itself, and each ancestor path up to the fork. Here
every tree has one path, so a row is plain packing without padding; a builder of shared prefixes only fills
`parents_T`, `depths_T` and `paths` differently, and everything that reads a row stays as it is.

Targets  Token t is predicted from the hidden state of `parents_T[t]`, never from position t - 1 of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traceforge.errors import ConfigError
from traceforge.samples.tokens import FloatArray, IntArray, Sample


@dataclass(frozen=True, slots=True)
class Path:
    """A contiguous range `[start, stop)` of a row; `parent` is the row position it continues from, or -1 at a root."""

    start: int
    stop: int
    parent: int = -1


@dataclass(frozen=True, slots=True)
class Row:
    """One packed forest.

    Args:
        token_ids_T: token ids in row order.
        depths_T: distance from the root of each token's tree: the position id that RoPE needs.
        parents_T: row position of each token's parent, -1 at a root.
        weights_T: training weight of each token, summed over the samples that hold it.
        paths: the contiguous ranges, in row order; they tile `[0, T)`.
        sample_ids: the samples in this row.
    """

    token_ids_T: IntArray
    depths_T: IntArray
    parents_T: IntArray
    weights_T: FloatArray
    paths: tuple[Path, ...]
    sample_ids: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens the model computes in this row."""
        return int(self.token_ids_T.shape[0])

    @property
    def total_weight(self) -> float:
        """Sum of the token weights: this row's part of the SFT denominator."""
        return float(self.weights_T.sum())

    def targets_N(self) -> IntArray:
        """Return the row positions of the trained tokens, ascending."""
        return np.flatnonzero(self.weights_T).astype(np.int64)


def build_rows(samples: Sequence[Sample], *, tokens_per_row: int) -> list[Row]:
    """Return rows that together hold every sample once, none longer than `tokens_per_row`.

    First fit, longest sample first (ties by position), so few rows are needed and the same samples always give the
    same rows. How samples fall into rows changes memory and speed, never the update.

    Raises:
        ConfigError: a sample is longer than a row.
    """
    order = sorted(range(len(samples)), key=lambda index: (-samples[index].num_tokens, index))
    bins: list[list[Sample]] = []
    room: list[int] = []
    for index in order:
        sample = samples[index]
        if sample.num_tokens > tokens_per_row:
            raise ConfigError(
                f"sample {sample.sample_id} has {sample.num_tokens} tokens, "
                f"training.tokens_per_row is {tokens_per_row}",
                hint="raise training.tokens_per_row or lower data.max_tokens",
            )
        for number, free in enumerate(room):
            if sample.num_tokens <= free:
                bins[number].append(sample)
                room[number] -= sample.num_tokens
                break
        else:
            bins.append([sample])
            room.append(tokens_per_row - sample.num_tokens)
    return [_lay_out(members) for members in bins]


def _lay_out(samples: Sequence[Sample]) -> Row:
    paths: list[Path] = []
    parents: list[IntArray] = []
    start = 0
    for sample in samples:
        stop = start + sample.num_tokens
        own = np.arange(start - 1, stop - 1, dtype=np.int64)
        own[0] = -1
        parents.append(own)
        paths.append(Path(start=start, stop=stop))
        start = stop
    return Row(
        token_ids_T=np.concatenate([sample.token_ids_S for sample in samples]),
        depths_T=np.concatenate([np.arange(sample.num_tokens, dtype=np.int64) for sample in samples]),
        parents_T=np.concatenate(parents),
        weights_T=np.concatenate([sample.weights_S for sample in samples]),
        paths=tuple(paths),
        sample_ids=tuple(sample.sample_id for sample in samples),
    )
