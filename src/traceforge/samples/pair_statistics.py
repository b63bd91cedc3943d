"""What a set of preference pairs holds, in the numbers of `statistics.py`.

Unit     Tokens, unless a name says otherwise. A pair is one item; its sequences are one a trained turn.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from traceforge.samples.branches import Pair
from traceforge.samples.prefix_tree import common_prefix_length, token_key
from traceforge.samples.statistics import (
    Lengths,
    PairStatistics,
    SetStatistics,
    TreeStatistics,
    describe_samples,
    describe_trees,
    ids_hash,
)
from traceforge.samples.tokens import IntArray, Sample


def describe_pairs(parts: Sequence[Sequence[Pair]], *, train: Sequence[Pair] = ()) -> SetStatistics:
    """Return the statistics of a non-empty set of pairs that comes in parts (one per source).

    A prefix tree spans the pairs of one group within one part, as for samples.
    """
    pairs = [pair for part in parts for pair in part]
    seen = {_digest(pair) for pair in train}
    of_sequences = describe_samples([_sequences(part) for part in parts])
    numbers: dict[str, object] = {
        "samples": len(pairs),
        "cuts": dict(sorted(Counter(code for pair in pairs for code in pair.cuts).items())),
        "cut_samples": sum(1 for pair in pairs if pair.cuts),
        "ids_hash": ids_hash(pair.pair_id for pair in pairs),
        "identical_in_train": sum(1 for pair in pairs if _digest(pair) in seen) if seen else 0,
        "pairs": count_pairs(pairs),
    }
    fields = {name: getattr(of_sequences, name) for name in SetStatistics.__struct_fields__}
    return SetStatistics(**{**fields, **numbers})


def describe_pair_trees(parts: Sequence[Sequence[Pair]], *, group: str) -> TreeStatistics:
    """Return the prefix trees of a set whose groups are as the run draws them; `group` names how that is."""
    return describe_trees([_sequences(part) for part in parts], group=group)


def count_pairs(pairs: Sequence[Pair]) -> PairStatistics:
    """Return what only pairs have, of a non-empty set."""
    chosen = [_trained(pair.chosen) for pair in pairs]
    rejected = [_trained(pair.rejected) for pair in pairs]
    return PairStatistics(
        pairs=len(pairs),
        sequences=sum(len(pair.samples) for pair in pairs),
        sequence_tokens=sum(sample.num_tokens for pair in pairs for sample in pair.samples),
        tree_tokens=sum(pair.num_tokens for pair in pairs),
        shared_prefix_tokens=_lengths([shared_prefix_tokens(pair) for pair in pairs]),
        chosen_tokens=_lengths(chosen),
        rejected_tokens=_lengths(rejected),
        longer_chosen=sum(one > other for one, other in zip(chosen, rejected, strict=True)),
        longer_rejected=sum(one < other for one, other in zip(chosen, rejected, strict=True)),
        multi_turn=sum(max(len(pair.chosen), len(pair.rejected)) > 1 for pair in pairs),
    )


def shared_prefix_tokens(pair: Pair) -> int:
    """Return how many tokens all sequences of a pair begin with: the prompt, and what the replies share."""
    first: IntArray = pair.samples[0].token_ids_S
    return min(common_prefix_length(first, sample.token_ids_S) for sample in pair.samples)


def _trained(samples: Sequence[Sample]) -> int:
    return sum(sample.num_trained_tokens for sample in samples)


def _sequences(pairs: Sequence[Pair]) -> list[Sample]:
    """Return the sequences of pairs, each under a group of its pair's."""
    return [replace(sample, group_id=pair.group_id) for pair in pairs for sample in pair.samples]


def _lengths(values: Sequence[int]) -> Lengths:
    array = np.array(values, dtype=np.int64)
    return Lengths(
        total=int(array.sum()),
        min=int(array.min()),
        median=float(np.median(array)),
        p95=int(np.percentile(array, 95, method="inverted_cdf")),
        max=int(array.max()),
    )


def _digest(pair: Pair) -> bytes:
    digest = hashlib.sha256()
    for side in (pair.chosen, pair.rejected):
        digest.update(len(side).to_bytes(4, "big"))
        for sample in side:
            digest.update(hashlib.sha256(token_key(sample.token_ids_S)).digest())
    return digest.digest()
