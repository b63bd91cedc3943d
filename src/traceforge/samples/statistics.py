"""What a data set holds, in numbers: lengths, trained share, repeated prefixes, refusals, cuts and id hashes.

Unit     Tokens, unless a name says otherwise. A refusal is a sample that is not there; a cut is one that is shorter.
Exact    The repeated-prefix share counts a radix tree's tokens without building it (`repeated_prefix_share`).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from traceforge.samples.prefix_tree import TreeSize, token_key, tree_size
from traceforge.samples.tokens import Sample

EXAMPLE_IDS = 20


class RefusalCount(msgspec.Struct, frozen=True):
    """Samples refused for one reason: how many, up to 20 ids, and the first one's explanation."""

    count: int
    examples: tuple[str, ...]
    detail: str


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens, over one number a pair."""

    total: int
    min: int
    median: float
    p95: int
    max: int


class PairStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a set holds if it is made of preference pairs.

    Args:
        pairs: how many.
        sequences: token sequences of both sides; more than two a pair where an ending has several trained turns.
        sequence_tokens: of all sequences, each for itself.
        tree_tokens: with each pair as one prefix tree.
        shared_prefix_tokens: at the beginning of every sequence of a pair.
        chosen_tokens: trained tokens of the chosen branch; one that several of its sequences train counts in each.
        rejected_tokens: the same of the rejected one.
        longer_chosen: pairs whose chosen branch is the longer one.
        longer_rejected: pairs whose rejected branch is the longer one.
        multi_turn: pairs with an ending of several trained turns.
    """

    pairs: int
    sequences: int
    sequence_tokens: int
    tree_tokens: int
    shared_prefix_tokens: Lengths
    chosen_tokens: Lengths
    rejected_tokens: Lengths
    longer_chosen: int
    longer_rejected: int
    multi_turn: int


class SetStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One set of samples as training or evaluation will see it.

    `trajectories` counts a row of a row file as one. `repeated_prefix_share` is the share of `tokens_total` that a
    prefix tree per trajectory would not compute again. `identical_in_train` counts evaluation samples whose very
    tokens are also a training sample.

    Of preference pairs, `samples`, `cut_samples`, `ids_hash` and `identical_in_train` are about pairs, `trajectories`
    counts groups, and tokens are those of their sequences, each for itself; `pairs` says what only pairs have.
    """

    samples: int
    tasks: int
    trajectories: int
    tokens_total: int
    tokens_min: int
    tokens_median: float
    tokens_p95: int
    tokens_max: int
    trained_tokens: int
    trained_share: float
    total_weight: float
    repeated_prefix_share: float
    cuts: dict[str, int]
    cut_samples: int
    ids_hash: str
    identical_in_train: int = 0
    pairs: PairStatistics | None = None


class TreeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A training set one by one and as prefix trees, one per group of `data.group`, none of them split.

    A prediction: an update may hold several groups, whose common beginnings are shared too, and a long tree may be
    split. What a run computed is `techniques.packing` of its evidence.
    """

    group: str
    sample_tokens: int
    tree_tokens: int
    trees: int
    forks: int


class SourceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `data.train`, or `data.evaluation`: what it is, which bytes, and what was refused in it.

    `resolution_source` is `local_hash` (`content_hash` is over the files) or `hub` (`resolved_commit` was read, and
    `content_hash` is over its rows). `examined` counts the samples that were rendered or tokenised; a selection by
    `data.train_rows` looks at no more than it needs.
    """

    path: str
    role: str
    kind: str
    weight: float
    available: int
    examined: int
    kept: int
    refusals: dict[str, RefusalCount]
    requested_revision: str | None
    resolved_commit: str | None
    resolution_source: str
    content_hash: str


class DatasetStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; `msgspec.to_builtins` or `as_dict` gives plain JSON values.

    `default_system_prompt` is what the chat template says on its own to `samples_with_default_system_prompt`
    samples whose history has no system message.
    """

    dataset_id: str
    requested_revision: str | None
    resolved_commit: str | None
    resolution_source: str
    content_hash: str
    selection_seed: int
    train_ids_hash: str
    evaluation_ids_hash: str | None
    train: SetStatistics
    evaluation: SetStatistics | None
    train_trees: TreeStatistics
    sources: tuple[SourceStatistics, ...]
    refusals: dict[str, RefusalCount]
    default_system_prompt: str | None
    samples_with_default_system_prompt: int

    def as_dict(self) -> dict[str, object]:
        """Return plain dicts, lists and numbers."""
        plain: dict[str, object] = msgspec.to_builtins(self)
        return plain


def ids_hash(sample_ids: Iterable[str]) -> str:
    """Return the sha256 of the ids in the order given, joined by newlines."""
    return hashlib.sha256("\n".join(sample_ids).encode()).hexdigest()


def describe_samples(parts: Sequence[Sequence[Sample]], *, train: Sequence[Sample] = ()) -> SetStatistics:
    """Return the statistics of a non-empty set that comes in parts (one per source).

    A prefix tree spans the samples of one group within one part: the same source given twice is not a saving.
    """
    samples = [sample for part in parts for sample in part]
    lengths = np.array([sample.num_tokens for sample in samples], dtype=np.int64)
    total = int(lengths.sum())
    trained = sum(sample.num_trained_tokens for sample in samples)
    seen = {_token_digest(sample) for sample in train}
    return SetStatistics(
        samples=len(samples),
        tasks=len({sample.task_id for sample in samples}),
        trajectories=len({sample.group_id for sample in samples}),
        tokens_total=total,
        tokens_min=int(lengths.min()),
        tokens_median=float(np.median(lengths)),
        tokens_p95=int(np.percentile(lengths, 95, method="inverted_cdf")),
        tokens_max=int(lengths.max()),
        trained_tokens=trained,
        trained_share=trained / total,
        total_weight=sum(sample.total_weight for sample in samples),
        repeated_prefix_share=1 - sum(prefix_tree_tokens(part) for part in parts) / total,
        cuts=dict(sorted(Counter(code for sample in samples for code in sample.cuts).items())),
        cut_samples=sum(1 for sample in samples if sample.cuts),
        ids_hash=ids_hash(sample.sample_id for sample in samples),
        identical_in_train=sum(1 for sample in samples if _token_digest(sample) in seen) if seen else 0,
    )


def describe_trees(parts: Sequence[Sequence[Sample]], *, group: str) -> TreeStatistics:
    """Return the prefix trees of a set whose groups are as the run draws them; `group` names how that is."""
    sizes = [size for part in parts for size in _group_sizes(part)]
    return TreeStatistics(
        group=group,
        sample_tokens=sum(sample.num_tokens for part in parts for sample in part),
        tree_tokens=sum(size.tokens for size in sizes),
        trees=sum(size.trees for size in sizes),
        forks=sum(size.forks for size in sizes),
    )


def prefix_tree_tokens(samples: Sequence[Sample]) -> int:
    """Return how many tokens the prefix trees of `samples` hold, one tree per group."""
    return sum(size.tokens for size in _group_sizes(samples))


def _group_sizes(samples: Sequence[Sample]) -> list[TreeSize]:
    groups: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    return [tree_size(members) for members in groups.values()]


def merge_refusals(parts: Iterable[dict[str, RefusalCount]]) -> dict[str, RefusalCount]:
    """Return the refusals of several sources added up, by code in alphabetical order."""
    merged: dict[str, RefusalCount] = {}
    for part in parts:
        for code, refused in part.items():
            held = merged.get(code, RefusalCount(0, (), refused.detail))
            examples = (held.examples + refused.examples)[:EXAMPLE_IDS]
            merged[code] = RefusalCount(held.count + refused.count, examples, held.detail)
    return dict(sorted(merged.items()))


class RefusalTally:
    """Counts refusals by reason code as they happen."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, list[str]] = {}
        self._details: dict[str, str] = {}

    def add(self, code: str, sample_id: str, detail: str) -> None:
        """Count one refused sample; the first 20 ids and the first detail of a code are kept."""
        self._counts[code] = self._counts.get(code, 0) + 1
        self._details.setdefault(code, detail)
        examples = self._examples.setdefault(code, [])
        if len(examples) < EXAMPLE_IDS:
            examples.append(sample_id)

    def counts(self) -> dict[str, RefusalCount]:
        """Return what was counted, by code in alphabetical order."""
        return {
            code: RefusalCount(count, tuple(self._examples[code]), self._details[code])
            for code, count in sorted(self._counts.items())
        }


def _token_digest(sample: Sample) -> bytes:
    return hashlib.sha256(token_key(sample.token_ids_S)).digest()
