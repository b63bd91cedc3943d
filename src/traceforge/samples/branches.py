"""Pairs: one prompt, two endings, each a branch; and rows in which every pair stands whole.

A *branch* is a weighted set of tokens, not necessarily one sequence: an ending of several turns under a template that
drops old reasoning has one sequence a turn. Its score is the weighted mean log-probability of its tokens. A token that
both branches share is computed once and counts in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from traceforge.errors import ConfigError
from traceforge.samples.prefix_tree import lay_out, token_key, tree_tokens
from traceforge.samples.rows import Row
from traceforge.samples.tokens import FloatArray, IntArray, Sample


@dataclass(frozen=True, slots=True)
class Pair:
    """One tokenised preference pair.

    Args:
        pair_id: `{chosen id}|{rejected id}`.
        group_id: the group an update never splits: the trajectory both fork from, or the pair itself.
        task_id: what the split into train and evaluation keeps together.
        chosen: one sample for each trained turn of the chosen ending, prompt included; together their trained tokens
            are the branch.
        rejected: the same for the rejected ending.
        cuts: reason codes of everything that was shortened or cut, in order.
    """

    pair_id: str
    group_id: str
    task_id: str
    chosen: tuple[Sample, ...]
    rejected: tuple[Sample, ...]
    cuts: tuple[str, ...] = field(default=())

    @property
    def sample_id(self) -> str:
        """The pair's id, under the name that samples have."""
        return self.pair_id

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All sequences of the pair."""
        return self.chosen + self.rejected

    @property
    def num_tokens(self) -> int:
        """Tokens of the pair as one tree."""
        return tree_tokens(self.samples)

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of both branches; one that they share counts in both."""
        return sum(sample.num_trained_tokens for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch in a row: the places of its tokens among the row's targets [N], and their weights.

    `total_weight` is the sum of the weights; a token that two sequences of the branch train stands here twice.
    """

    targets_B: IntArray
    weights_B: FloatArray

    @property
    def total_weight(self) -> float:
        """Sum of the weights: what the score is divided by."""
        return float(self.weights_B.sum())


_NO_BRANCH = Branch(np.zeros(0, dtype=np.int64), np.zeros(0))


@dataclass(frozen=True, slots=True)
class PairRow:
    """A row that holds whole pairs, with the branches of each in the order of `pair_ids`."""

    row: Row
    pair_ids: tuple[str, ...]
    chosen: tuple[Branch, ...]
    rejected: tuple[Branch, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens the model computes in this row."""
        return self.row.num_tokens

    @property
    def num_forks(self) -> int:
        """Paths of the row that continue from another one."""
        return self.row.num_forks

    @property
    def total_weight(self) -> float:
        """Sum of the token weights of all branches."""
        return self.row.total_weight


def build_pair_rows(pairs: Sequence[Pair], *, tokens_per_row: int, share: bool = True) -> list[PairRow]:
    """Return rows that together hold every pair once, each pair whole in one row.

    Pairs that fork from one trajectory lie together and share its prefix too. Without `share` every sequence is a tree
    of its own.

    Raises:
        ConfigError: a pair does not fit into a row.
    """
    size = tree_tokens if share else _tokens_one_by_one
    ordered = sorted(pairs, key=lambda pair: token_key(pair.samples[0].token_ids_S)) if share else list(pairs)
    rows: list[list[Pair]] = []
    for pair in ordered:
        alone = size(pair.samples)
        if alone > tokens_per_row:
            raise ConfigError(
                f"pair {pair.pair_id} has {alone} tokens, training.tokens_per_row is {tokens_per_row}",
                hint="raise training.tokens_per_row or lower data.max_tokens; a pair is never split",
            )
        together = [*rows[-1], pair] if rows else [pair]
        if rows and size([sample for each in together for sample in each.samples]) <= tokens_per_row:
            rows[-1] = together
        else:
            rows.append([pair])
    return [_pair_row(members, share) for members in rows]


def build_branch_rows(pairs: Sequence[Pair], side: int, *, tokens_per_row: int, share: bool = True) -> list[PairRow]:
    """Return one row a pair that holds one side only: 0 = the chosen branch, 1 = the rejected one.

    Both sides of a pair thus have the same number of rows in the same order, whatever their lengths, so that two ranks
    that run one side each can exchange scores row by row. The other side's branches are empty.

    Raises:
        ConfigError: a branch does not fit into a row.
    """
    size = tree_tokens if share else _tokens_one_by_one
    rows = []
    for pair in pairs:
        members = pair.rejected if side else pair.chosen
        alone = size(members)
        if alone > tokens_per_row:
            raise ConfigError(
                f"the {('chosen', 'rejected')[side]} branch of pair {pair.pair_id} has {alone} tokens, "
                f"training.tokens_per_row is {tokens_per_row}",
                hint="raise training.tokens_per_row or lower data.max_tokens; a branch is never split",
            )
        empty: tuple[Sample, ...] = ()
        one_side = replace(pair, chosen=empty, rejected=members) if side else replace(pair, rejected=empty)
        rows.append(_pair_row([one_side], share))
    return rows


def _tokens_one_by_one(samples: Sequence[Sample]) -> int:
    return sum(sample.num_tokens for sample in samples)


def _pair_row(pairs: Sequence[Pair], share: bool) -> PairRow:
    # Sequences are found again by a name of their own: two pairs may hold the same sample.
    named = [
        (number, side, sample)
        for number, pair in enumerate(pairs)
        for side, samples in enumerate((pair.chosen, pair.rejected))
        for sample in samples
    ]
    renamed = [
        Sample(str(place), sample.group_id, sample.task_id, sample.token_ids_S, sample.weights_S)
        for place, (_, _, sample) in enumerate(named)
    ]
    row = lay_out(renamed, share)
    targets_N = row.targets_N()
    parts: list[tuple[list[IntArray], list[FloatArray]]] = [([], []) for _ in range(2 * len(pairs))]
    for number, name in enumerate(row.sample_ids):
        pair_number, side, sample = named[int(name)]
        trained_S = np.flatnonzero(sample.weights_S)
        positions = row.sample_positions_S(number)[trained_S]
        places, weights = parts[2 * pair_number + side]
        places.append(np.searchsorted(targets_N, positions).astype(np.int64))
        weights.append(sample.weights_S[trained_S])
    branches = [
        Branch(np.concatenate(places), np.concatenate(weights)) if places else _NO_BRANCH for places, weights in parts
    ]
    return PairRow(
        row=row,
        pair_ids=tuple(pair.pair_id for pair in pairs),
        chosen=tuple(branches[0::2]),
        rejected=tuple(branches[1::2]),
    )
