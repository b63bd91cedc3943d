"""What prefix trees make of a set of samples: tokens, attention and work, one by one against in rows.

Unit     A group is what an update never splits, a trajectory. Each is counted as if an update held it alone: an update
         of several groups shares their common beginnings too and lets small trees stand in one row.
Tokens   Of all samples, each for itself (`sample_tokens`); of the trees as they are (`tree_tokens`); of the rows of at
         most `tokens_per_row` that the trees are cut into (`row_tokens`), which is what a model computes.
Pairs    (query, key) pairs that attention looks at: a token sees its ancestors and itself, so `depth + 1` each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from traceforge.samples.fork_causes import Continuity
from traceforge.samples.model_shape import ModelShape
from traceforge.samples.prefix_tree import build_rows, tree_size
from traceforge.samples.rows import Path, Row
from traceforge.samples.tokens import Sample

_SHOWN_GROUPS = 5


class TreeCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Some groups of samples, one by one and in trees. Counts add up: see `summed`.

    `forks` and `trees` are of the trees as they are, before any is split. `targets` are tokens whose log-probability
    is computed: a token that two samples train counts once in a row.
    """

    samples: int
    trees: int
    forks: int
    rows: int
    sample_tokens: int
    tree_tokens: int
    row_tokens: int
    sample_pairs: int
    row_pairs: int
    sample_targets: int
    row_targets: int

    @property
    def token_factor(self) -> float:
        """How many times fewer tokens are computed in rows than one by one."""
        return self.sample_tokens / self.row_tokens

    @property
    def pair_factor(self) -> float:
        """How many times fewer (query, key) pairs attention looks at."""
        return self.sample_pairs / self.row_pairs

    @property
    def repeated_tokens(self) -> int:
        """Tokens of trunks that are computed again because a tree is split over rows."""
        return self.row_tokens - self.tree_tokens

    def flop_factor(self, shape: ModelShape) -> float:
        """Return how many times less work a model of this shape has, attention and output layer included."""
        alone = shape.forward_flops(tokens=self.sample_tokens, pairs=self.sample_pairs, targets=self.sample_targets)
        return alone / shape.forward_flops(tokens=self.row_tokens, pairs=self.row_pairs, targets=self.row_targets)

    def as_dict(self, shape: ModelShape | None) -> dict[str, Any]:
        """Return JSON values, factors included; that of the work is None where the model's shape is not known."""
        return {
            **msgspec.to_builtins(self),
            "repeated_tokens": self.repeated_tokens,
            "token_factor": self.token_factor,
            "pair_factor": self.pair_factor,
            "flop_factor": None if shape is None else self.flop_factor(shape),
        }


class GroupTrees(msgspec.Struct, frozen=True):
    """One group and what its trees come to."""

    group_id: str
    counts: TreeCounts


class TreePath(msgspec.Struct, frozen=True, kw_only=True):
    """A path of a drawn tree.

    Args:
        depth: how many tokens stand above its first one: where it forks off.
        tokens: its own.
        parent: number of the path that it forks off from, -1 at a root.
        turns: the samples that end on it, by the part of their id after `#`, in their order.
        trained: depth ranges of trained tokens.
    """

    depth: int
    tokens: int
    parent: int
    turns: tuple[str, ...]
    trained: tuple[tuple[int, int], ...]


class DrawnTree(msgspec.Struct, frozen=True):
    """The trees of one group as paths, in row order: a path, then what continues it, the deepest fork first."""

    group_id: str
    counts: TreeCounts
    paths: tuple[TreePath, ...]

    @property
    def depth(self) -> int:
        """Tokens from the root to the deepest leaf."""
        return max(path.depth + path.tokens for path in self.paths)


class TreeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that `inspect` says about sharing.

    Args:
        tokens_per_row: longest row.
        shape: of the model, or None: then nothing is said about work.
        total: of all groups.
        groups: the few that save most.
        num_groups: how many there are.
        continuity: how turns follow each other, and why not.
        drawn: the trees of one group.
    """

    tokens_per_row: int
    shape: ModelShape | None
    total: TreeCounts
    groups: tuple[GroupTrees, ...]
    num_groups: int
    continuity: Continuity
    drawn: DrawnTree

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values, with the factors of each count."""
        return {
            **msgspec.to_builtins(self),
            "total": self.total.as_dict(self.shape),
            "groups": [
                {"group_id": group.group_id, "counts": group.counts.as_dict(self.shape)} for group in self.groups
            ],
            "drawn": {**msgspec.to_builtins(self.drawn), "counts": self.drawn.counts.as_dict(self.shape)},
        }


def report_trees(
    groups: Mapping[str, Sequence[Sample]],
    continuity: Continuity,
    *,
    tokens_per_row: int,
    drawn: str,
    shape: ModelShape | None = None,
) -> TreeReport:
    """Return the report over non-empty groups; `drawn` is the id of the one whose trees are drawn.

    Raises:
        ConfigError: a sample is longer than a row.
    """
    counted = [
        GroupTrees(group_id, count_trees(members, tokens_per_row=tokens_per_row))
        for group_id, members in groups.items()
    ]
    counts = next(group.counts for group in counted if group.group_id == drawn)
    return TreeReport(
        tokens_per_row=tokens_per_row,
        shape=shape,
        total=summed([group.counts for group in counted]),
        groups=tuple(most_saved(counted, _SHOWN_GROUPS)),
        num_groups=len(counted),
        continuity=continuity,
        drawn=draw_tree(groups[drawn], counts=counts),
    )


def grouped(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of each group, groups and samples in the order they come."""
    groups: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    return dict(groups)


def count_trees(members: Sequence[Sample], *, tokens_per_row: int) -> TreeCounts:
    """Return what the samples of one group come to, one by one and in rows.

    Raises:
        ConfigError: a sample is longer than a row.
    """
    size = tree_size(members)
    rows = build_rows(members, tokens_per_row=tokens_per_row)
    lengths = [sample.num_tokens for sample in members]
    return TreeCounts(
        samples=len(members),
        trees=size.trees,
        forks=size.forks,
        rows=len(rows),
        sample_tokens=sum(lengths),
        tree_tokens=size.tokens,
        row_tokens=sum(row.num_tokens for row in rows),
        sample_pairs=sum(length * (length + 1) // 2 for length in lengths),
        row_pairs=sum(int(row.depths_T.sum()) + row.num_tokens for row in rows),
        sample_targets=sum(sample.num_trained_tokens for sample in members),
        row_targets=sum(int(row.targets_N().size) for row in rows),
    )


def summed(counts: Sequence[TreeCounts]) -> TreeCounts:
    """Return the counts of several groups added up."""
    names = TreeCounts.__struct_fields__
    return TreeCounts(**{name: sum(getattr(each, name) for each in counts) for name in names})


def most_saved(groups: Sequence[GroupTrees], count: int) -> list[GroupTrees]:
    """Return the groups that save most tokens, the first of equals first."""
    return sorted(groups, key=lambda group: group.counts.row_tokens - group.counts.sample_tokens)[:count]


def draw_tree(members: Sequence[Sample], *, counts: TreeCounts) -> DrawnTree:
    """Return the trees of one group as paths, not split whatever the size of a row."""
    (row,) = build_rows(members, tokens_per_row=sum(sample.num_tokens for sample in members))
    order = {sample.sample_id: number for number, sample in enumerate(members)}
    starts = [path.start for path in row.paths]
    ending: defaultdict[int, list[str]] = defaultdict(list)
    for sample_id, end in zip(row.sample_ids, row.sample_ends, strict=True):
        ending[bisect_right(starts, end) - 1].append(sample_id)
    paths = tuple(
        TreePath(
            depth=int(row.depths_T[path.start]),
            tokens=path.stop - path.start,
            parent=bisect_right(starts, path.parent) - 1 if path.parent >= 0 else -1,
            turns=tuple(name.rpartition("#")[2] for name in sorted(ending[number], key=order.__getitem__)),
            trained=_trained_ranges(row, path),
        )
        for number, path in enumerate(row.paths)
    )
    return DrawnTree(members[0].group_id, counts, paths)


def _trained_ranges(row: Row, path: Path) -> tuple[tuple[int, int], ...]:
    trained = np.flatnonzero(row.weights_T[path.start : path.stop])
    if not trained.size:
        return ()
    first = int(row.depths_T[path.start])
    borders = [0, *(np.flatnonzero(np.diff(trained) > 1) + 1).tolist(), trained.size]
    return tuple((int(trained[start]) + first, int(trained[stop - 1]) + first + 1) for start, stop in pairwise(borders))
