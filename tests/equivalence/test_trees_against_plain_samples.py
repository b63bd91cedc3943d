"""Prefix trees give the loss and every gradient of the samples run one by one.

Tolerances as in `test_rows_against_plain_samples.py`: float32 loss 1e-6, gradients 1e-4; float64 1e-10. Every planted
bug below moves them by orders of magnitude.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.equivalence.test_rows_against_plain_samples import assert_same_update
from tests.tiny_models import tiny_language_model

from traceforge.models import attention, kernels, language_model, rectangles
from traceforge.samples import prefix_tree
from traceforge.samples.rows import Path, Piece, attention_pieces
from traceforge.samples.tokens import Sample

FAMILIES = ("llama", "qwen3", "qwen2", "mistral")
VOCABULARY = 211


def sample(number: int, ids, trained_from: int = 1, weight: float = 1.0) -> Sample:
    ids = np.asarray(ids, dtype=np.int64)
    weights = np.zeros(len(ids))
    weights[max(1, trained_from) :] = weight
    return Sample(f"s{number}", f"s{number}", "t", ids, weights)


def piece(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


P, A, B, C, D = (piece(seed, length) for seed, length in enumerate((20, 9, 7, 5, 6)))

CASES = {
    "the design's picture": [sample(0, P + A, 20), sample(1, P + B, 20), sample(2, P + B + C, 27)],
    "turns of one trajectory": [sample(n, P[: 4 * n] + piece(50 + n, 3), 4 * n) for n in range(1, 6)],
    "several levels": [
        sample(0, P + A + B, 20),
        sample(1, P + A + C, 29),
        sample(2, P + A[:4] + D, 20),
        sample(3, P + A[:4] + D[:3] + C, 23),
        sample(4, P[:10] + D, 5),
        sample(5, P[:10] + D + B, 16),
    ],
    "fork at token 0": [sample(0, A), sample(1, B), sample(2, C)],
    "fork inside a trained span": [sample(0, P + A, 10), sample(1, P + A[:5] + B, 10), sample(2, P[:12] + C, 10)],
    "a sample inside another": [sample(0, P[:8]), sample(1, P, 8), sample(2, P[:15], 8)],
    "duplicates count twice": [sample(0, P + A, 20), sample(1, P + A, 20), sample(2, P + B, 20)],
    "one sample": [sample(0, P + A, 20)],
    "a forest": [sample(0, P + A, 20), sample(1, P + B, 20), sample(2, D + A, 3), sample(3, D + C, 3), sample(4, C)],
    "weights": [sample(0, P + A, 20, 0.5), sample(1, P + A[:5] + C, 12, 2.0), sample(2, P + B, 20, 3.0)],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("members", CASES.values(), ids=CASES.keys())
def test_a_tree_gives_the_update_of_its_samples(family, members):
    model = tiny_language_model(family)
    assert model.layout == "tree"
    assert_same_update(model, members, tokens_per_row=200)


@pytest.mark.parametrize("tokens_per_row", [36, 45, 60])
def test_a_tree_cut_into_rows_gives_the_same_update(tokens_per_row):
    members = [each for name in ("several levels", "a forest") for each in CASES[name]]
    members = [dataclasses.replace(each, sample_id=f"n{n}") for n, each in enumerate(members)]
    model = tiny_language_model("qwen3")
    assert len(model.rows(members, tokens_per_row=tokens_per_row)) > 1
    assert_same_update(model, members, tokens_per_row=tokens_per_row)


@pytest.mark.parametrize("name", ["several levels", "a forest", "turns of one trajectory"])
def test_in_float64_a_tree_and_its_samples_agree_to_rounding(name):
    model = tiny_language_model("qwen3", dtype=torch.float64)
    assert_same_update(
        model, CASES[name], tokens_per_row=200, loss_tolerance=1e-10, gradient_tolerance=1e-10, reference="sdpa"
    )


def test_all_parameters_trained_through_a_tree():
    model = tiny_language_model("llama", adapter=False, tie_word_embeddings=True)
    assert_same_update(model, CASES["several levels"], tokens_per_row=200)


def test_recomputed_layers_keep_the_tree():
    from traceforge.memory.recompute import recompute_layers

    model = tiny_language_model("llama")
    recompute_layers(model.base.base_model.layers)
    assert_same_update(model, CASES["several levels"], tokens_per_row=200)


@pytest.fixture(scope="module")
def small_model():
    return tiny_language_model("qwen3", layers=1)


@given(
    lists=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=7),
    tokens_per_row=st.integers(8, 40),
)
@settings(max_examples=25, deadline=None)
def test_any_set_of_samples_gives_the_update_of_its_samples(small_model, lists, tokens_per_row):
    members = [sample(n, ids) for n, ids in enumerate(lists)]
    assert_same_update(small_model, members, tokens_per_row=tokens_per_row, degenerate=True)


# Planted bugs: each must be seen. They work on a case where every part of the tree matters.

MEMBERS = CASES["several levels"]


def assert_update_differs(model, members=MEMBERS, tokens_per_row=200):
    with pytest.raises(AssertionError):
        assert_same_update(model, members, tokens_per_row=tokens_per_row)


def plant_in_rows(monkeypatch, change):
    real = prefix_tree.build_rows
    monkeypatch.setattr(
        language_model, "build_rows", lambda *args, **keywords: [change(row) for row in real(*args, **keywords)]
    )


def plant_in_pieces(monkeypatch, change):
    real = attention_pieces
    monkeypatch.setattr(attention, "attention_pieces", lambda paths: change(list(real(paths)), paths))


def test_planted_a_target_lost_at_the_fork_is_seen(monkeypatch):
    model = tiny_language_model("llama")

    def drop(row):
        weights = row.weights_T.copy()
        weights[[path.start for path in row.paths if path.parent >= 0]] = 0
        return dataclasses.replace(row, weights_T=weights)

    plant_in_rows(monkeypatch, drop)
    assert_update_differs(model)


def test_planted_a_fork_target_read_at_the_token_before_it_in_the_row_is_seen(monkeypatch):
    model = tiny_language_model("llama")
    plant_in_rows(monkeypatch, lambda row: dataclasses.replace(row, parents_T=np.arange(-1, row.num_tokens - 1)))
    assert_update_differs(model)


def test_planted_a_depth_off_by_one_is_seen(monkeypatch):
    model = tiny_language_model("llama")

    def shift(row):
        depths = row.depths_T.copy()
        for path in row.paths:
            if path.parent >= 0:
                depths[path.start : path.stop] += 1
        return dataclasses.replace(row, depths_T=depths)

    plant_in_rows(monkeypatch, shift)
    assert_update_differs(model)


def test_planted_a_visible_sibling_is_seen(monkeypatch):
    model = tiny_language_model("llama")

    def show_sibling(pieces, paths):
        return tuple(p if p.causal else Piece(p.query_start, p.query_stop, 0, p.query_start, False) for p in pieces)

    plant_in_pieces(monkeypatch, show_sibling)
    assert_update_differs(model)


def test_planted_a_visible_tail_of_an_ancestor_is_seen(monkeypatch):
    model = tiny_language_model("llama")

    def show_tail(pieces, paths):
        stops = {path.start: path.stop for path in paths}
        return tuple(p if p.causal else p._replace(key_stop=stops[p.key_start]) for p in pieces)

    plant_in_pieces(monkeypatch, show_tail)
    assert_update_differs(model)


def test_planted_a_shared_weight_counted_once_is_seen(monkeypatch):
    model = tiny_language_model("llama")
    plant_in_rows(monkeypatch, lambda row: dataclasses.replace(row, weights_T=np.minimum(row.weights_T, 1.0)))
    assert_update_differs(model)


def test_planted_a_trunk_cut_at_the_wrong_token_is_seen(monkeypatch):
    model = tiny_language_model("llama")

    def cut_late(row):
        parents = row.parents_T.copy()
        paths = []
        for path in row.paths:
            parent = path.parent + 1 if path.parent >= 0 else -1
            parents[path.start] = parent
            paths.append(Path(path.start, path.stop, parent))
        return dataclasses.replace(row, paths=tuple(paths), parents_T=parents)

    plant_in_rows(monkeypatch, cut_late)
    assert_update_differs(model)


def test_planted_parts_merged_without_their_log_sum_exp_are_seen(monkeypatch):
    model = tiny_language_model("llama")

    def average(output, logsumexp, part, part_lse):
        output.add_(part).mul_(0.5)

    monkeypatch.setattr(rectangles, "_merge", average)
    assert_update_differs(model)


def test_planted_a_backward_with_the_log_sum_exp_of_one_part_is_seen(monkeypatch):
    """The loss stays right and only the gradient is wrong."""
    model = tiny_language_model("llama")
    real = kernels.CpuFlash

    class OwnPart(real):
        def backward(self, grad, inputs, output, logsumexp, *, causal, scale):
            own = self.forward(*inputs, causal=causal, scale=scale)[1]
            return super().backward(grad, inputs, output, own, causal=causal, scale=scale)

    monkeypatch.setattr(kernels, "_CPU_FLASH", OwnPart())
    assert_update_differs(model)
