"""The numbers of prefix trees by brute force: tries of whole prefixes, dense visibility matrices, and a real model."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dataset_stubs import sample
from tests.tiny_models import tiny_network
from torch.utils.flop_counter import FlopCounterMode

from traceforge.errors import ConfigError
from traceforge.samples.fork_causes import Continuity
from traceforge.samples.model_shape import ModelShape, read_model_shape
from traceforge.samples.prefix_tree import build_rows, tree_size
from traceforge.samples.tokens import Sample
from traceforge.samples.tree_report import count_trees, draw_tree, most_saved, report_trees, summed
from traceforge.samples.tree_views import MOST_BARS, picture, tree_lines, tree_summary, turn_words


def turns(*texts: str, group: str = "run") -> list[Sample]:
    """Return one sample a text, a token a character; capital letters are trained."""
    return [
        sample(f"{group}#{number}", [ord(c.lower()) for c in text], [float(c.isupper()) for c in text], group)
        for number, text in enumerate(texts)
    ]


# The picture of the design: A and B fork behind six shared tokens, C goes on from B.
DESIGN = ("ppppppAAA", "ppppppBB", "ppppppbbCC")


def trie_of(members) -> dict[tuple[int, ...], float]:
    """Return weight by prefix: a token of the tree is the prefix that ends in it."""
    weights: dict[tuple[int, ...], float] = {}
    for each in members:
        ids = tuple(each.token_ids_S.tolist())
        for depth in range(len(ids)):
            weights[ids[: depth + 1]] = weights.get(ids[: depth + 1], 0.0) + float(each.weights_S[depth])
    return weights


def forks_and_trees(trie) -> tuple[int, int]:
    """Return how many children stand beside a first one, and how many roots there are."""
    children: dict[tuple[int, ...], int] = {}
    for prefix in trie:
        children[prefix[:-1]] = children.get(prefix[:-1], 0) + 1
    return sum(count - 1 for prefix, count in children.items() if prefix), children[()]


def visible_pairs(row) -> int:
    """Return the ones of the dense visibility matrix, filled by walking from each token to its root."""
    seen = np.zeros((row.num_tokens, row.num_tokens), dtype=bool)
    for position in range(row.num_tokens):
        ancestor = position
        while ancestor >= 0:
            seen[position, ancestor] = True
            ancestor = int(row.parents_T[ancestor])
    return int(seen.sum())


def test_the_numbers_of_the_picture_of_the_design() -> None:
    counts = count_trees(turns(*DESIGN), tokens_per_row=100)
    assert (counts.samples, counts.trees, counts.forks, counts.rows) == (3, 1, 1, 1)
    assert (counts.sample_tokens, counts.tree_tokens, counts.row_tokens, counts.repeated_tokens) == (27, 13, 13, 0)
    # One by one 9*10/2 + 8*9/2 + 10*11/2; in the tree 55 for the deepest path and 7 + 8 + 9 for the other.
    assert (counts.sample_pairs, counts.row_pairs) == (136, 79)
    assert (counts.sample_targets, counts.row_targets) == (7, 7)
    assert counts.token_factor == 27 / 13
    assert counts.pair_factor == 136 / 79


def test_a_split_tree_says_how_much_of_its_trunk_is_computed_again() -> None:
    counts = count_trees(turns(*DESIGN), tokens_per_row=10)
    assert (counts.rows, counts.tree_tokens, counts.row_tokens, counts.repeated_tokens) == (2, 13, 19, 6)
    assert (counts.forks, counts.row_pairs) == (1, 45 + 55)
    with pytest.raises(ConfigError, match=r"sample run#2 has 10 tokens, training.tokens_per_row is 9"):
        count_trees(turns(*DESIGN), tokens_per_row=9)


token_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=10)


@given(token_lists, st.integers(9, 40), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_every_count_is_the_one_of_a_dictionary_and_a_dense_matrix(lists, tokens_per_row, random) -> None:
    members = [
        sample(f"g#{n}", ids, [0.0, *(float(random.random() < 0.5) for _ in ids[1:])], "g")
        for n, ids in enumerate(lists)
    ]
    counts = count_trees(members, tokens_per_row=tokens_per_row)
    trie = trie_of(members)
    assert (counts.forks, counts.trees) == forks_and_trees(trie)
    assert counts.tree_tokens == len(trie)
    assert counts.sample_tokens == sum(len(ids) for ids in lists)
    assert counts.sample_pairs == sum(int(np.tril(np.ones((len(ids), len(ids)))).sum()) for ids in lists)
    rows = build_rows(members, tokens_per_row=tokens_per_row)
    tries = [trie_of([each for each in members if each.sample_id in row.sample_ids]) for row in rows]
    assert counts.row_tokens == sum(len(each) for each in tries)
    assert counts.row_targets == sum(weight > 0 for each in tries for weight in each.values())
    assert counts.row_pairs == sum(visible_pairs(row) for row in rows)
    (whole,) = build_rows(members, tokens_per_row=1000)
    assert tree_size(members) == (whole.num_tokens, sum(path.parent < 0 for path in whole.paths), whole.num_forks)


def test_counts_of_groups_add_up_and_the_largest_saving_comes_first() -> None:
    groups = {"b": turns("xyZ", group="b"), "a": turns(*DESIGN, group="a"), "c": turns("abC", "abcD", group="c")}
    report = report_trees(groups, Continuity(3, 1, ()), tokens_per_row=50, drawn="c")
    assert [group.group_id for group in report.groups] == ["a", "c", "b"]
    assert [group.group_id for group in most_saved(report.groups, 1)] == ["a"]
    assert report.total == summed([count_trees(members, tokens_per_row=50) for members in groups.values()])
    assert report.total.sample_tokens == 3 + 27 + 7
    assert (report.num_groups, report.drawn.group_id) == (3, "c")
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["total"]["token_factor"] == 37 / 20
    assert plain["total"]["flop_factor"] is None
    assert plain["groups"][0]["counts"]["repeated_tokens"] == 0
    assert plain["drawn"]["paths"] == [
        {"depth": 0, "tokens": 4, "parent": -1, "turns": ["0", "1"], "trained": [[2, 4]]}
    ]


def test_a_drawn_tree_says_where_each_turn_ends_and_what_is_trained() -> None:
    members = turns(*DESIGN)
    tree = draw_tree(members, counts=count_trees(members, tokens_per_row=50))
    trunk, fork = tree.paths
    assert (trunk.depth, trunk.tokens, trunk.parent, trunk.turns, trunk.trained) == (0, 10, -1, ("1", "2"), ((6, 10),))
    assert (fork.depth, fork.tokens, fork.parent, fork.turns, fork.trained) == (6, 3, 0, ("0",), ((6, 9),))
    assert tree.depth == 10


@given(token_lists)
@settings(max_examples=150, deadline=None)
def test_no_connector_of_the_picture_crosses_a_bar(lists) -> None:
    members = [sample(f"g#{n}", ids, [0.0] * len(ids), "g") for n, ids in enumerate(lists)]
    tree = draw_tree(members, counts=count_trees(members, tokens_per_row=50))
    assert sum(path.tokens for path in tree.paths) == len(trie_of(members))
    assert sorted(turn for path in tree.paths for turn in path.turns) == sorted(str(n) for n in range(len(lists)))
    for number, path in enumerate(tree.paths):
        if path.parent < 0:
            assert path.depth == 0
            continue
        parent = tree.paths[path.parent]
        assert parent.depth < path.depth <= parent.depth + parent.tokens
        for between in tree.paths[path.parent + 1 : number]:
            assert not between.depth < path.depth < between.depth + between.tokens


def forked(count: int) -> list[Sample]:
    """Return turns that each fork from one trunk, one token further each time."""
    trunk = list(range(count + 1))
    return [sample(f"r#{n}", [*trunk[: n + 1], 999], [0.0] * (n + 1) + [1.0], "r") for n in range(count)]


def report_of(members, continuity=None):
    found = continuity or Continuity(len(members) - 1, len(members) - 1, ())
    return report_trees({members[0].group_id: members}, found, tokens_per_row=10_000, drawn=members[0].group_id)


def test_a_terminal_sees_at_most_twenty_lines_of_a_tree_and_how_much_is_left_out() -> None:
    for count in (2, 15, 16, 17, 300):
        lines = tree_lines(report_of(forked(count)))
        drawn = lines[next(n for n, line in enumerate(lines) if line.startswith("r:")) :]
        assert len(drawn) <= 20
        bars = [line for line in drawn if "█" in line]
        left_out = sum(int(n) for n in re.findall(r"… (\d+) paths? not drawn", "\n".join(drawn)))
        assert len(bars) + left_out == count
        assert len({line.index("turn") for line in bars}) == 1  # the words stand in one column
    tokens = [int(line.split()[1]) for line in bars] + [
        int(n) for n in re.findall(r"not drawn, (\d+) tokens", "\n".join(drawn))
    ]
    assert sum(tokens) == tree_size(forked(300)).tokens


def test_a_large_tree_is_drawn_without_its_middle() -> None:
    drawn = picture(report_of(forked(300)).drawn)
    assert len(drawn.bars) == MOST_BARS
    assert drawn.num_rows == MOST_BARS + 1
    assert sorted([*(bar.row for bar in drawn.bars), drawn.gap_row]) == list(range(MOST_BARS + 1))
    assert drawn.gap == f"{300 - MOST_BARS} paths not drawn, {300 - MOST_BARS} tokens"
    whole = picture(report_of(forked(5)).drawn)
    assert (whole.gap_row, len(whole.bars)) == (None, 5)
    for bar in (*drawn.bars, *whole.bars):
        assert 0 <= bar.left < 100
        assert bar.from_row is None or bar.from_row < bar.row


def test_the_summary_says_what_is_saved_and_that_sharing_breaks_nowhere() -> None:
    text = dict(tree_summary(report_of(turns("abC", "abcdE"))))
    assert text["prefix trees"] == "8 tokens one by one, 5 in 1 tree with 0 forks"
    assert text["  in rows"] == "5 tokens in 1 row of at most 10,000, none twice"
    assert text["  saved"] == "1.6× fewer tokens, 1.4× fewer attention pairs"
    assert text["  sharing breaks"] == "nowhere: each of 1 turns continues the one before"
    alone = report_trees({"a": turns("aB", group="a")}, Continuity(0, 0, ()), tokens_per_row=9, drawn="a")
    assert tree_summary(alone) == [("prefix trees", "none: each sample is a group of its own")]
    assert tree_lines(alone) == []


def test_turns_are_written_as_ranges() -> None:
    assert turn_words(["4"]) == "turn 4"
    assert turn_words(["4", "4"]) == "turn 4"
    assert turn_words(["0", "1", "2", "10", "3"]) == "turns 0–3, 10"
    assert turn_words(["a", "7"]) == "a, 7"


CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 96, "vocab_size": 211,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_work_of_a_model_is_what_torch_counts(family, tmp_path) -> None:
    # Eager attention looks at every pair and full logits are computed: 17 * 17 pairs, 17 targets.
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": family}))
    shape = read_model_shape(str(tmp_path))
    assert shape is not None
    network = tiny_network(family, layers=3)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(input_ids=torch.arange(17)[None])
    assert shape.forward_flops(tokens=17, pairs=17 * 17, targets=17) == counter.get_total_flops()


def test_the_factor_of_work_weighs_tokens_pairs_and_targets() -> None:
    shape = ModelShape(
        layers=1, hidden=1, intermediate=0, vocabulary=10, heads=1, key_value_heads=1, head_size=1
    )  # 2 * 4 a token, 4 a pair, 20 a target
    counts = count_trees(turns(*DESIGN), tokens_per_row=50)
    assert counts.flop_factor(shape) == (8 * 27 + 4 * 136 + 20 * 7) / (8 * 13 + 4 * 79 + 20 * 7)


@pytest.mark.parametrize(
    "text", ["{", "[1]", json.dumps({**CONFIG, "model_type": "gpt2"}), json.dumps({**CONFIG, "hidden_size": None}),
             json.dumps({**CONFIG, "num_attention_heads": 0, "head_dim": None})],
)  # fmt: skip
def test_a_model_of_unknown_shape_has_no_guessed_cost(text, tmp_path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_model_shape(str(tmp_path)) is None
    assert read_model_shape(str(tmp_path / "missing")) is None
    assert read_model_shape("no hub id") is None


def test_heads_of_an_older_config_follow_from_the_others(tmp_path) -> None:
    older = {name: value for name, value in CONFIG.items() if name not in {"head_dim", "num_key_value_heads"}}
    (tmp_path / "config.json").write_text(json.dumps(older))
    shape = read_model_shape(str(tmp_path))
    assert shape is not None
    assert (shape.key_value_heads, shape.head_size) == (4, 12)


def test_the_order_of_samples_changes_no_count() -> None:
    members = turns(*DESIGN, "ppqX", "zzY")
    wanted = count_trees(members, tokens_per_row=14)
    for order in itertools.permutations(members):
        assert count_trees(order, tokens_per_row=14) == wanted
