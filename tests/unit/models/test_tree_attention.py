"""Attention over rows against a dense mask: a softmax over a full score matrix, in float64.

The mask is made from the samples, not from the rows' rectangles: what a token may see are the tokens before it in any
sample that holds it. The gradients of query, key and value are compared too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_models import tiny_network
from torch import Tensor

from traceforge.models import attention
from traceforge.models.kernels import assign_kernels
from traceforge.samples.prefix_tree import build_rows
from traceforge.samples.rows import Row, attention_pieces
from traceforge.samples.tokens import Sample

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
"""Relative L2 of the output and of each gradient: only the order of summation differs."""


def sample(number: int, ids: Sequence[int]) -> Sample:
    return Sample(f"s{number}", "g", "t", np.asarray(ids, dtype=np.int64), np.r_[0.0, np.ones(len(ids) - 1)])


def only_row(lists: Sequence[Sequence[int]], *, share: bool = True) -> Row:
    (row,) = build_rows([sample(n, ids) for n, ids in enumerate(lists)], tokens_per_row=1_000_000, share=share)
    return row


def allowed_from_samples(row: Row) -> Tensor:
    """Return [T, T]: whether a token sees another, found by walking each sample on its own."""
    allowed_TT = torch.zeros(row.num_tokens, row.num_tokens, dtype=torch.bool)
    for number in range(len(row.sample_ids)):
        positions_S = torch.as_tensor(row.sample_positions_S(number))
        allowed_TT[positions_S[:, None], positions_S[None, :]] |= torch.ones(
            len(positions_S), len(positions_S), dtype=torch.bool
        ).tril()
    return allowed_TT


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask_TT: Tensor, scale: float) -> Tensor:
    """Return softmax attention under an additive float mask, with the whole score matrix in memory."""
    repeats = query.shape[1] // key.shape[1]
    wide_key, wide_value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    return ((query @ wide_key.transpose(-1, -2)) * scale + mask_TT).softmax(-1) @ wide_value


def merged_pieces(row: Row, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return what the product computes."""
    tasks = assign_kernels(attention_pieces(row.paths), CPU, query.dtype, query.shape[-1])
    output: Tensor = attention._MergedPieces.apply(query, key, value, tasks, scale)
    return output


def attention_errors(row: Row, dtype: torch.dtype, *, heads: int = 4, groups: int = 2, size: int = 16) -> list[float]:
    """Return the relative L2 error of the output and of the gradients of query, key and value.

    A gradient that is exactly zero (a token that sees only itself has none for query and key) is compared with the
    gradient that came in.
    """
    generator = torch.Generator().manual_seed(row.num_tokens)
    shapes = [(1, count, row.num_tokens, size) for count in (heads, groups, groups, heads)]
    *inputs, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    scale = 0.3

    leaves = [each.to(dtype).requires_grad_(True) for each in inputs]
    output = merged_pieces(row, *leaves, scale)
    found = [output, *torch.autograd.grad(output, leaves, grad.to(dtype))]

    exact = [each.detach().double().requires_grad_(True) for each in leaves]
    mask_TT = torch.zeros(row.num_tokens, row.num_tokens, dtype=torch.float64)
    mask_TT.masked_fill_(~allowed_from_samples(row), -torch.inf)
    reference = dense_attention(*exact, mask_TT, scale)
    wanted = [reference, *torch.autograd.grad(reference, exact, grad.to(dtype).double())]
    norms = [float(each.detach().norm()) or float(grad.norm()) for each in wanted]
    errors = [float((a.double() - b).detach().norm()) for a, b in zip(found, wanted, strict=True)]
    return [error / norm for error, norm in zip(errors, norms, strict=True)]


def random_forest(seed: int, *, trees: int = 2, branches: int = 6, longest: int = 90) -> list[list[int]]:
    """Return samples that continue or fork from earlier ones at random tokens."""
    generator = np.random.default_rng(seed)
    lists: list[list[int]] = [
        [tree, *generator.integers(10, 1000, generator.integers(2, longest)).tolist()] for tree in range(trees)
    ]
    for _ in range(branches):
        trunk = lists[generator.integers(len(lists))]
        keep = int(generator.integers(1, len(trunk) + 1))
        lists.append(trunk[:keep] + generator.integers(10, 1000, generator.integers(1, longest)).tolist())
    return lists


SHAPES = {
    "one path": [[1, 2, 3, 4, 5]],
    "fork at the first token": [[1, 2, 3], [1, 4, 5, 6]],
    "no token shared": [[1, 2, 3], [4, 5], [6, 7, 8, 9]],
    "two forks at one token": [[1, 2, 3, 4], [1, 2, 5], [1, 2, 6, 7]],
    "a fork of a fork of a fork": [[1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 9], [1, 2, 7, 10, 11], [1, 2, 7, 10, 12]],
    "a comb": [[*range(depth), 100 + depth] for depth in range(1, 40)],
    "a sample inside another": [[1, 2, 3, 4, 5], [1, 2, 3]],
    "forks longer than the trunk": [[1, 2, *range(10, 60)], [1, 2, *range(110, 170)], [1, 3, *range(210, 290)]],
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lists", SHAPES.values(), ids=SHAPES.keys())
def test_merged_pieces_are_attention_under_the_dense_mask(lists, dtype):
    assert max(attention_errors(only_row(lists), dtype)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(6))
def test_random_forests_are_attention_under_the_dense_mask(seed, dtype):
    row = only_row(random_forest(seed))
    assert row.num_forks >= 4
    assert max(attention_errors(row, dtype)) <= TOLERANCE[dtype]


def test_a_forest_longer_than_the_kernels_blocks_is_attention_under_the_dense_mask():
    """The CPU kernel works in blocks of up to 256 queries and 512 keys; here forks fall inside and across them."""
    row = only_row(random_forest(3, trees=2, branches=7, longest=700))
    assert row.num_tokens > 1500
    assert max(attention_errors(row, torch.float32, heads=2, groups=1)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (3, 3), (6, 2), (4, 1)])
def test_heads_that_share_keys_get_the_sum_of_their_gradients(heads, groups):
    row = only_row(random_forest(1))
    assert max(attention_errors(row, torch.float64, heads=heads, groups=groups)) <= TOLERANCE[torch.float64]


@given(
    lists=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9),
    share=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_set_of_samples_is_attention_under_the_dense_mask(lists, share):
    row = only_row(lists, share=share)
    assert max(attention_errors(row, torch.float64, heads=2, groups=1, size=8)) <= TOLERANCE[torch.float64]


@given(lists=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_the_pieces_cover_what_is_visible_once_and_nothing_else(lists):
    row = only_row(lists)
    covered_TT = torch.zeros(row.num_tokens, row.num_tokens, dtype=torch.int64)
    for piece in attention_pieces(row.paths):
        block = torch.ones(piece.query_stop - piece.query_start, piece.key_stop - piece.key_start, dtype=torch.int64)
        covered_TT[piece.query_start : piece.query_stop, piece.key_start : piece.key_stop] += (
            block.tril() if piece.causal else block
        )
    assert torch.equal(covered_TT, allowed_from_samples(row).long())


def test_scores_far_apart_do_not_overflow_where_parts_are_merged():
    row = only_row([[1, 2, 3, 4], [1, 2, 5, 6]])
    query = torch.full((1, 1, row.num_tokens, 8), 30.0)
    key = torch.linspace(-30, 30, row.num_tokens)[None, None, :, None].expand(1, 1, -1, 8).contiguous()
    value = torch.randn(1, 1, row.num_tokens, 8, generator=torch.Generator().manual_seed(0))
    found = merged_pieces(row, query, key, value, 1.0)
    mask_TT = torch.zeros(row.num_tokens, row.num_tokens).masked_fill(~allowed_from_samples(row), -torch.inf)
    torch.testing.assert_close(found, dense_attention(query, key, value, mask_TT, 1.0))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_model_over_a_forest_is_the_same_model_under_a_dense_mask(family):
    """The whole network on one row: our attention against transformers' eager attention with the mask given to it."""
    network = tiny_network(family, vocabulary=1000)
    row = only_row(random_forest(5))
    inputs = {
        "input_ids": torch.as_tensor(row.token_ids_T)[None],
        "position_ids": torch.as_tensor(row.depths_T)[None],
        "use_cache": False,
    }
    mask_TT = torch.zeros(row.num_tokens, row.num_tokens)
    mask_TT.masked_fill_(~allowed_from_samples(row), torch.finfo(torch.float32).min)
    with torch.no_grad():
        wanted = network.base_model(**inputs, attention_mask=mask_TT[None, None]).last_hidden_state
        attention.register()
        network.set_attn_implementation(attention.NAME)
        layout = attention.layout_of(row, CPU, torch.float32, 16)
        found = network.base_model(**inputs, **{attention.LAYOUT_KEYWORD: layout}).last_hidden_state
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-5
