"""Rows: what the model runs over in one pass. A row is a forest of paths laid side by side in one sequence.

A *path* is one contiguous range of the row. It continues from its *parent token*, a position of an earlier path of the
same row, or starts a tree of its own. What a token sees is its own path up to itself, and each ancestor path up to the
fork. Several trees in one row are padding-free packing; a row of one path is a plain causal sequence.

    position     0 1 2 3 4 5 6 7 8   9 10   11 12
    token        p p p p p p b b c   a  a    d  e        paths   [0, 9)   parent -1   depth 0..8
    parent      -1 0 1 2 3 4 5 6 7   5  9    7 11                [9, 11)  parent  5   depth 6..7
    depth        0 1 2 3 4 5 6 7 8   6  7    8  9                [11, 13) parent  7   depth 8..9

Targets  Token t is predicted from the hidden state of `parents_T[t]`, never from position t - 1 of the row: at a fork
         one hidden state predicts several tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from traceforge.samples.tokens import FloatArray, IntArray


class Path(NamedTuple):
    """A contiguous range `[start, stop)` of a row; `parent` is the row position it continues from, or -1 at a root."""

    start: int
    stop: int
    parent: int = -1


class Piece(NamedTuple):
    """One rectangle of attention: a contiguous range of queries against a contiguous range of keys.

    `causal`: a path against itself (both ranges are equal). Otherwise every query of the range sees every key of it.
    """

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One forest in row order.

    Args:
        token_ids_T: token ids.
        depths_T: distance from the root of each token's tree: the position id that RoPE needs.
        parents_T: row position of each token's parent, -1 at a root.
        weights_T: training weight of each token, summed over the samples that hold it.
        paths: the contiguous ranges, in row order: they tile `[0, T)`, and each path is followed by all that continues
            it, so every subtree is one range.
        sample_ids: the samples in this row.
        sample_ends: row position of the last token of each of them.
    """

    token_ids_T: IntArray
    depths_T: IntArray
    parents_T: IntArray
    weights_T: FloatArray
    paths: tuple[Path, ...]
    sample_ids: tuple[str, ...]
    sample_ends: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens the model computes in this row."""
        return int(self.token_ids_T.shape[0])

    @property
    def num_forks(self) -> int:
        """Paths that continue from another one."""
        return sum(path.parent >= 0 for path in self.paths)

    @property
    def total_weight(self) -> float:
        """Sum of the token weights: this row's part of the SFT denominator."""
        return float(self.weights_T.sum())

    def targets_N(self) -> IntArray:
        """Return the row positions of the trained tokens, ascending."""
        return np.flatnonzero(self.weights_T).astype(np.int64)

    def visible_until_T(self) -> IntArray:
        """Return for each token the end of the range of row positions that see it, itself first.

        In row order whatever continues a token stands right behind it: the rest of its path, then the forks after it.
        So token j is seen by token i exactly if `j <= i < visible_until_T[j]`.
        """
        ends_T = np.arange(1, self.num_tokens + 1, dtype=np.int64)
        for path in reversed(self.paths):
            own = slice(path.start, path.stop)
            ends_T[own] = np.maximum.accumulate(np.maximum(ends_T[own], path.stop)[::-1])[::-1]
            if path.parent >= 0:
                ends_T[path.parent] = max(ends_T[path.parent], ends_T[path.start])
        return ends_T

    def sample_positions_S(self, number: int) -> IntArray:
        """Return the row positions of all tokens of sample `number`, first token first."""
        ranges = []
        for path, stop in self._ancestry(self.sample_ends[number]):
            ranges.append(np.arange(path.start, stop, dtype=np.int64))
        return np.concatenate(ranges[::-1])

    def _ancestry(self, position: int) -> list[tuple[Path, int]]:
        """Return the paths from `position` to its root, each with the end of the part that `position` continues."""
        found = []
        starts = [path.start for path in self.paths]
        while position >= 0:
            path = self.paths[bisect_right(starts, position) - 1]
            found.append((path, position + 1))
            position = path.parent
        return found


def attention_pieces(paths: tuple[Path, ...]) -> tuple[Piece, ...]:
    """Return all that the tokens of a row see, as at most two rectangles a path. Causal ones come first.

    Every path sees itself, causally. And where a path forks off, it *and everything that continues it* see the other
    path up to the fork; in row order (a path, then what continues it, the deepest fork first) those queries are one
    range. The forks of one path make a staircase, which `_staircase` cuts into few large rectangles and small rests:

        keys of the path   0 ─────────────▶
        deepest fork       ██████████████▒▒
        next               ██████████████        many short forks of a long path thus cost large, fast rectangles,
        next               ▓▓▓▓▓▓▓▒▒             not one narrow rectangle each
        shallowest         ▓▓▓▓▓▓▓
    """
    starts = [path.start for path in paths]
    parents = [bisect_right(starts, path.parent) - 1 if path.parent >= 0 else -1 for path in paths]
    stops = [path.stop for path in paths]
    for number in reversed(range(len(paths))):
        if parents[number] >= 0:
            stops[parents[number]] = max(stops[parents[number]], stops[number])
    forks: dict[int, list[_Fork]] = {}
    for number, path in enumerate(paths):
        if parents[number] < 0:
            continue
        siblings = forks.setdefault(parents[number], [])
        fork = _Fork(path.start, stops[number], path.parent + 1)
        if siblings and siblings[-1].key_stop == fork.key_stop:  # at one token: one rectangle for both
            siblings[-1] = siblings[-1]._replace(query_stop=fork.query_stop)
        else:
            siblings.append(fork)
    pieces = [Piece(path.start, path.stop, path.start, path.stop, causal=True) for path in paths]
    for number, siblings in forks.items():
        pieces += _staircase(siblings, paths[number].start)
    return tuple(pieces)


class _Fork(NamedTuple):
    """What continues a path at one of its tokens: a range of queries, and where the part that they see ends."""

    query_start: int
    query_stop: int
    key_stop: int


def _staircase(forks: list[_Fork], key_start: int) -> list[Piece]:
    """Return rectangles that cover `[key_start, key_stop)` of each fork; forks are in row order, the deepest first."""
    if not forks:
        return []
    if len(forks) == 1:
        return [Piece(forks[0].query_start, forks[0].query_stop, key_start, forks[0].key_stop, causal=False)]
    deeper, shallower = forks[: len(forks) // 2], forks[len(forks) // 2 :]
    common = deeper[-1].key_stop
    whole = Piece(deeper[0].query_start, deeper[-1].query_stop, key_start, common, causal=False)
    return [whole, *_staircase(deeper[:-1], common), *_staircase(shallower, key_start)]
