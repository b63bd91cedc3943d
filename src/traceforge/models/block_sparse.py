"""Tree attention in one block-sparse kernel (FlexAttention), for CUDA rows with many short forks.

A token j is seen by the range `[j, visible_until[j])` of row positions (`Row.visible_until_T`), so one comparison is
the mask, and which blocks are empty, whole or mixed follows from the least and the largest end in a block of keys.
Rows are padded to a multiple of `_LENGTH_STEP` and the kernel is compiled for any length, so that updates of changing
lengths do not compile again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from traceforge.samples.rows import Row
from traceforge.samples.tokens import IntArray

NAME = "flex_attention"
BLOCK_TOKENS = 128
_LENGTH_STEP = 512


def block_tables(visible_until_T: IntArray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which [query block, key block] pairs are mixed (need the mask) and which are whole, as booleans.

    Args:
        visible_until_T: see `Row.visible_until_T`; positions from `len(visible_until_T)` to `length` are padding, and
            see only themselves.
        length: padded length, a multiple of `BLOCK_TOKENS`.
    """
    until = np.arange(1, length + 1)
    until[: len(visible_until_T)] = visible_until_T
    blocks = until.reshape(-1, BLOCK_TOKENS)
    first = np.arange(len(blocks)) * BLOCK_TOKENS
    below = first[None, :] < first[:, None]
    on = first[None, :] == first[:, None]
    seen = (below & (blocks.max(1)[None, :] > first[:, None])) | on
    whole = below & (blocks.min(1)[None, :] >= first[:, None] + BLOCK_TOKENS)
    return seen & ~whole, whole


def block_mask(row: Row, device: torch.device) -> Any:
    """Return FlexAttention's block mask of a row, with its padded length in `seq_lengths`."""
    from torch.nn.attention.flex_attention import BlockMask

    length = -(-row.num_tokens // _LENGTH_STEP) * _LENGTH_STEP
    until = row.visible_until_T()
    mixed, whole = block_tables(until, length)
    padded = np.arange(1, length + 1)
    padded[: len(until)] = until
    until_T = torch.as_tensor(padded, device=device, dtype=torch.int32)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < until_T[key])

    def table(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
        order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
        counts = torch.as_tensor(blocks.sum(1).astype(np.int32), device=device)
        return counts[None, None], torch.as_tensor(order, device=device)[None, None]

    return BlockMask.from_kv_blocks(
        *table(mixed), *table(whole), BLOCK_SIZE=BLOCK_TOKENS, mask_mod=visible, seq_lengths=(length, length)
    )


def block_sparse_attention(query_1HTK: Tensor, key_1GTK: Tensor, value_1GTK: Tensor, mask: Any, scale: float) -> Tensor:
    """Return the attention output [1, H, T, K] of a row whose block mask is `mask`."""
    tokens = query_1HTK.shape[2]
    missing = mask.seq_lengths[0] - tokens
    padded = [torch.nn.functional.pad(each, (0, 0, 0, missing)) for each in (query_1HTK, key_1GTK, value_1GTK)]
    grouped = query_1HTK.shape[1] != key_1GTK.shape[1]
    output_1HTK: Tensor = _compiled()(*padded, block_mask=mask, scale=scale, enable_gqa=grouped)
    return output_1HTK[:, :, :tokens]


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
