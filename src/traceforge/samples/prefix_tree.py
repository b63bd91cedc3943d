"""The prefix tree: any set of samples in, rows out in which every shared prefix stands once.

    sample A   p p p p p p a a a                     p p p p p p ─┬─ a a a
    sample B   p p p p p p b b          ───▶                      └─ b b ─── c c
    sample C   p p p p p p b b c c

A causal model's state at a token depends only on the path from the root to it, so one computation serves every sample
that shares it. The tree is built from the token ids of whole samples: where a template drops old reasoning or a cut
differs, the samples simply fork there.

How   1. Sort the samples. Neighbours then share the longest prefixes, and a sample costs its length less what it shares
         with the sample before it. 2. Cut the sorted list into rows where `tokens_per_row` is reached: the cut falls on
         a fork, and the trunk is computed again in the next row. 3. Build the radix tree of each row and lay it out as
         paths, each following its deepest branch, so few paths are needed and the longest comes first.
Work  Linear in tokens, after a sort that compares neighbouring prefixes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from traceforge.errors import ConfigError
from traceforge.samples.rows import Path, Row
from traceforge.samples.tokens import IntArray, Sample


def build_rows(samples: Sequence[Sample], *, tokens_per_row: int, share: bool = True) -> list[Row]:
    """Return rows that together hold every sample once, none longer than `tokens_per_row`.

    Each token's weight is the sum over the samples of its row that hold it, so a token trained in two samples counts
    twice. The same samples give the same rows. How they fall into rows changes memory and speed, never the update.

    Args:
        share: merge common prefixes; without it every sample is a tree of its own (dropout needs that).

    Raises:
        ConfigError: a sample is longer than a row.
    """
    for sample in samples:
        if sample.num_tokens > tokens_per_row:
            raise ConfigError(
                f"sample {sample.sample_id} has {sample.num_tokens} tokens, "
                f"training.tokens_per_row is {tokens_per_row}",
                hint="raise training.tokens_per_row or lower data.max_tokens",
            )
    ordered = sorted(samples, key=lambda sample: token_key(sample.token_ids_S)) if share else list(samples)
    shared = _shared_with_previous(ordered, share)
    return [lay_out(members, share) for members in _fill_rows(ordered, shared, tokens_per_row)]


class TreeSize(NamedTuple):
    """The prefix trees of some samples if they are not split. `forks` are paths that continue from another one."""

    tokens: int
    trees: int
    forks: int


def tree_size(samples: Sequence[Sample]) -> TreeSize:
    """Return the size of the prefix trees of `samples` without building them."""
    ordered = sorted(samples, key=lambda sample: token_key(sample.token_ids_S))
    shared = _shared_with_previous(ordered, share=True)
    tokens = sum(sample.num_tokens - known for sample, known in zip(ordered, shared, strict=True))
    trees = sum(known == 0 for known in shared)
    # In sorted order a sample is a leaf unless the next one goes on from it (or equals it); each leaf ends a path.
    leaves = sum(known < sample.num_tokens for sample, known in zip(ordered, [*shared[1:], 0], strict=False))
    return TreeSize(tokens, trees, leaves - trees)


def tree_tokens(samples: Sequence[Sample]) -> int:
    """Return how many tokens the prefix tree of `samples` holds if it is not split."""
    return tree_size(samples).tokens


def token_key(token_ids_S: IntArray) -> bytes:
    """Return bytes that compare as the sequences do: big-endian, so the first differing token decides."""
    return token_ids_S.astype(">u4").tobytes()


def common_prefix_length(left: IntArray, right: IntArray) -> int:
    """Return how many leading tokens two sequences share."""
    shorter = min(left.size, right.size)
    if not shorter or left[0] != right[0]:  # unrelated samples, quickly
        return 0
    (differing,) = (left[:shorter] != right[:shorter]).nonzero()
    return int(differing[0]) if differing.size else int(shorter)


def _shared_with_previous(ordered: Sequence[Sample], share: bool) -> list[int]:
    if not share or not ordered:
        return [0] * len(ordered)
    pairs = itertools.pairwise(ordered)
    return [0, *(common_prefix_length(left.token_ids_S, right.token_ids_S) for left, right in pairs)]


def _fill_rows(ordered: Sequence[Sample], shared: Sequence[int], tokens_per_row: int) -> list[list[Sample]]:
    """Return the samples of each row: runs of the sorted list, then short runs put together, longest run first."""
    runs: list[list[Sample]] = []
    sizes: list[int] = []
    for sample, known in zip(ordered, shared, strict=True):
        added = sample.num_tokens - known
        if known == 0 or sizes[-1] + added > tokens_per_row:
            runs.append([sample])
            sizes.append(sample.num_tokens)
        else:
            runs[-1].append(sample)
            sizes[-1] += added
    rows: list[list[Sample]] = []
    room: list[int] = []
    full, smallest = 0, min(sizes, default=0)  # the first `full` rows have no room for any run
    for size, members in sorted(zip(sizes, runs, strict=True), key=lambda run: -run[0]):
        while full < len(room) and room[full] < smallest:
            full += 1
        for number in range(full, len(room)):
            if size <= room[number]:
                rows[number] += members
                room[number] -= size
                break
        else:
            rows.append(list(members))
            room.append(tokens_per_row - size)
    return rows


@dataclass(slots=True)
class _Node:
    """The end of an edge of the radix tree. `sample` is one that runs through it; `reach` its deepest leaf."""

    depth: int
    sample: int
    children: list[_Node] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    reach: int = 0


def _insert(ordered: Sequence[Sample], shared: Sequence[int]) -> _Node:
    """Return the root of the radix tree of sorted samples; `stack` holds the nodes on the last sample's way down."""
    root = _Node(0, -1)
    stack = [root]
    for number, (sample, known) in enumerate(zip(ordered, shared, strict=True)):
        below: _Node | None = None
        while stack[-1].depth > known:
            below = stack.pop()
        if stack[-1].depth < known:  # the fork lies inside an edge: cut it there
            assert below is not None
            fork = _Node(known, below.sample, [below])
            stack[-1].children[-1] = fork
            stack.append(fork)
        if sample.num_tokens > known:
            leaf = _Node(sample.num_tokens, number)
            stack[-1].children.append(leaf)
            stack.append(leaf)
        stack[-1].ends.append(number)
    return root


def _set_reach(root: _Node) -> None:
    order, pending = [], [root]
    while pending:
        node = pending.pop()
        order.append(node)
        pending += node.children
    for node in reversed(order):
        node.reach = max((child.reach for child in node.children), default=node.depth)


def lay_out(members: Sequence[Sample], share: bool) -> Row:
    """Return one row that holds all of `members`; without `share` each is a tree of its own."""
    ordered = sorted(members, key=lambda sample: token_key(sample.token_ids_S)) if share else list(members)
    root = _insert(ordered, _shared_with_previous(ordered, share))
    _set_reach(root)
    paths: list[Path] = []
    depths: list[int] = []  # depth of each path's first token
    tokens: list[IntArray] = []
    ends = [0] * len(ordered)
    length = 0
    pending = [(child, 0, -1) for child in sorted(root.children, key=lambda child: child.reach)]
    while pending:
        node, depth, parent = pending.pop()
        start, first = length, depth
        while True:  # follow the deepest branch; the others fork off
            for number in node.ends:
                ends[number] = start + node.depth - first - 1
            if not node.children:
                break
            deepest = max(node.children, key=lambda child: child.reach)
            fork = start + node.depth - first - 1
            others = [child for child in node.children if child is not deepest]
            pending += [(child, node.depth, fork) for child in sorted(others, key=lambda child: child.reach)]
            node = deepest
        tokens.append(ordered[node.sample].token_ids_S[first : node.depth])
        length += node.depth - first
        paths.append(Path(start, length, parent))
        depths.append(first)
    return _finish(ordered, paths, depths, tokens, ends)


def _finish(
    ordered: Sequence[Sample], paths: list[Path], depths: list[int], tokens: list[IntArray], ends: list[int]
) -> Row:
    length = paths[-1].stop
    parents_T = np.arange(-1, length - 1, dtype=np.int64)
    depths_T = np.arange(length, dtype=np.int64)
    for path, depth in zip(paths, depths, strict=True):
        parents_T[path.start] = path.parent
        depths_T[path.start : path.stop] += depth - path.start
    row = Row(
        token_ids_T=np.concatenate(tokens),
        depths_T=depths_T,
        parents_T=parents_T,
        weights_T=np.zeros(length),
        paths=tuple(paths),
        sample_ids=tuple(sample.sample_id for sample in ordered),
        sample_ends=tuple(ends),
    )
    starts = [path.start for path in paths]
    for number, sample in enumerate(ordered):
        _add_weights(row, starts, number, sample)
    return row


def _add_weights(row: Row, starts: Sequence[int], number: int, sample: Sample) -> None:
    """Add a sample's weights where its tokens stand; only the paths that hold trained tokens of it are visited."""
    (trained_S,) = sample.weights_S.nonzero()
    assert not trained_S.size or trained_S[0] > 0, "a root token has no parent to be predicted from"
    position = row.sample_ends[number]
    while trained_S.size:
        path = row.paths[bisect_right(starts, position) - 1]
        first = int(row.depths_T[path.start])
        here = trained_S >= first
        row.weights_T[trained_S[here] - first + path.start] += sample.weights_S[trained_S[here]]
        trained_S = trained_S[~here]
        position = path.parent
