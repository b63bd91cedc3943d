"""Seven preference pairs of one sequence a side, with the endings that make a mistake show.

The first three fork from one trajectory. Token 0 pads in the trainer that they are compared with, so it stands in
prompts and endings here; some endings hold untrained tokens between trained ones, as a tool's answer does.
"""

from __future__ import annotations

import numpy as np

from traceforge.samples.branches import Pair
from traceforge.samples.tokens import Sample

_VOCABULARY = 211


def _ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, _VOCABULARY, length).tolist()


def _side(name: str, prompt: list[int], ending: list[int], untrained: slice) -> tuple[Sample]:
    weights_S = np.zeros(len(prompt) + len(ending))
    weights_S[len(prompt) :] = 1.0
    weights_S[len(prompt) :][untrained] = 0.0
    return (Sample(name, name, "task", np.array(prompt + ending, dtype=np.int64), weights_S),)


def pair(
    name: str, prompt: list[int], chosen: list[int], rejected: list[int], *, untrained: slice = slice(0, 0)
) -> Pair:
    """Return a pair of two endings of one prompt; `untrained` are tokens of both endings that are context only."""
    sides = (_side(f"{name}/{side}", prompt, ids, untrained) for side, ids in (("c", chosen), ("r", rejected)))
    return Pair(name, name, "task", *sides)


_TRUNK, _OTHER = [*_ids(0, 17), 0, *_ids(1, 12)], _ids(2, 9)
_REPLY = _ids(3, 11)

PAIRS = (
    pair("one turn each", _TRUNK, _ids(16, 9), _ids(4, 14)),
    pair("a reply token that both share", _TRUNK[:22], _REPLY, _REPLY[:4] + _ids(6, 6)),
    pair("a tool's answer inside", _TRUNK[:26], _ids(7, 12), _ids(8, 10), untrained=slice(3, 6)),
    pair("the chosen side is a prefix of the rejected", _OTHER, _REPLY[:5], _REPLY),
    pair("replies of one token", _ids(9, 14), [0], [5]),
    pair("equal lengths", _ids(10, 8), _ids(11, 6), _ids(12, 6)),
    pair("a long rejected side", _ids(13, 6), _ids(14, 3), _ids(15, 31)),
)
UPDATES = (PAIRS[:3], PAIRS[3:4], PAIRS[4:])
"""Three updates; the second one is short. All share a reply token in the first."""
