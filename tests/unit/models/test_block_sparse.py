"""The block tables of the block-sparse kernel against the rectangles; its forward on the CPU against the merged pieces.

FlexAttention has no backward on the CPU: gradients are compared on the GPU (`tests/gpu`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from traceforge.models import attention, block_sparse
from traceforge.models.kernels import kernel_for
from traceforge.samples.prefix_tree import build_rows
from traceforge.samples.rows import attention_pieces
from traceforge.samples.tokens import Sample


def forked_row(turns: int, seed: int = 0):
    generator = np.random.default_rng(seed)
    history = generator.integers(0, 1000, 700)
    samples = []
    for turn in range(turns):
        ids = np.concatenate([history[: 60 * (turn + 1)], generator.integers(0, 1000, 37)])
        samples.append(Sample(f"s{turn}", "g", "t", ids, np.r_[0.0, np.ones(len(ids) - 1)]))
    (row,) = build_rows(samples, tokens_per_row=100_000)
    return row


@pytest.mark.parametrize("turns", [1, 5, 11])
def test_the_blocks_hold_exactly_what_is_visible(turns):
    row = forked_row(turns)
    length = -(-row.num_tokens // 512) * 512
    mixed, whole = block_sparse.block_tables(row.visible_until_T(), length)
    assert not (mixed & whole).any()
    visible = np.zeros((length, length), dtype=bool)
    for piece in attention_pieces(row.paths):
        shape = (piece.query_stop - piece.query_start, piece.key_stop - piece.key_start)
        block = np.tril(np.ones(shape, dtype=bool)) if piece.causal else True
        visible[piece.query_start : piece.query_stop, piece.key_start : piece.key_stop] = block
    tiles = visible.reshape(length // 128, 128, length // 128, 128).transpose(0, 2, 1, 3)
    assert tiles[whole].all()
    assert not tiles[~(mixed | whole)].any()


def test_its_forward_equals_the_merged_rectangles(monkeypatch):
    monkeypatch.setattr(block_sparse, "_compiled", lambda: torch.nn.attention.flex_attention.flex_attention)
    import torch.nn.attention.flex_attention

    row = forked_row(9)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, row.num_tokens, 16, generator=generator) for heads in (4, 2, 2))
    mask = block_sparse.block_mask(row, torch.device("cpu"))
    found = block_sparse.block_sparse_attention(query, key, value, mask, 0.25)
    kernel = kernel_for(torch.device("cpu"), torch.float32)
    wanted = attention._MergedPieces.apply(query, key, value, attention_pieces(row.paths), 0.25, kernel)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_only_rows_with_many_forks_on_cuda_in_16_bits_take_it():
    many, few = forked_row(11), forked_row(3)
    cuda = torch.device("cuda")
    assert attention.runs_block_sparse(many, cuda, torch.bfloat16)
    assert not attention.runs_block_sparse(few, cuda, torch.bfloat16)
    assert not attention.runs_block_sparse(many, cuda, torch.float32)
    assert not attention.runs_block_sparse(many, torch.device("cpu"), torch.bfloat16)
