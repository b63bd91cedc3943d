"""The block tables of the block-sparse kernel against the rectangles; its forward on the CPU against the merged pieces.

FlexAttention has no backward on the CPU: gradients are compared on the GPU (`tests/gpu`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from traceforge.models import attention, block_sparse
from traceforge.models.kernels import assign_kernels
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
    tasks = assign_kernels(attention_pieces(row.paths), torch.device("cpu"), torch.float32, 16)
    wanted = attention._MergedPieces.apply(query, key, value, tasks, 0.25)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_only_rows_with_many_forks_on_cuda_in_16_bits_take_it():
    many, few = forked_row(11), forked_row(3)
    cuda = torch.device("cuda")
    assert attention.runs_block_sparse(many, cuda, torch.bfloat16)
    assert not attention.runs_block_sparse(few, cuda, torch.bfloat16)
    assert not attention.runs_block_sparse(many, cuda, torch.float32)
    assert not attention.runs_block_sparse(many, torch.device("cpu"), torch.bfloat16)


def test_rectangles_cut_for_cudnn_cover_the_same_pairs_and_start_with_the_causal_part(monkeypatch):
    from traceforge.models import kernels

    monkeypatch.setattr(kernels, "cudnn_is_fastest", lambda *arguments: True)
    monkeypatch.setattr(kernels, "_KEY_BUCKET", 16)
    monkeypatch.setattr(kernels, "_QUERY_BUCKET", 8)
    for turns in (1, 2, 7):
        row = forked_row(turns)
        pieces = attention_pieces(row.paths)
        tasks = kernels.assign_kernels(pieces, torch.device("cuda"), torch.bfloat16, 64)
        assert {task.kernel.name for task in tasks} == {"cudnn", "cuda_flash"}
        counts = []
        for rectangles in (pieces, [task.piece for task in tasks]):
            seen = np.zeros((row.num_tokens, row.num_tokens), dtype=int)
            written = np.zeros(row.num_tokens, dtype=bool)
            for piece in rectangles:
                queries, keys = slice(piece.query_start, piece.query_stop), slice(piece.key_start, piece.key_stop)
                shape = (piece.query_stop - piece.query_start, piece.key_stop - piece.key_start)
                seen[queries, keys] += np.tril(np.ones(shape, dtype=int)) if piece.causal else 1
                if piece.causal:
                    assert not written[queries].any()
                    written[queries] = True
                else:
                    assert written[queries].all()
            counts.append(seen)
        assert np.array_equal(*counts)
        assert counts[0].max() == 1
