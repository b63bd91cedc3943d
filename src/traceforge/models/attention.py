"""Attention over a row: few plain rectangles, merged exactly by log-sum-exp.

A row is a forest of paths (`samples/rows.py`). A token sees its own path up to itself and each ancestor path up to the
fork, and that is a handful of contiguous ranges (`attention_pieces`): each runs on the fastest plain kernel of the
device, without a mask. Two parts of one query's softmax over disjoint keys, with outputs o1, o2 and log-sum-exps l1,
l2, are together

    l = log(exp(l1) + exp(l2))        o = o1 exp(l1 - l) + o2 exp(l2 - l)

(`rectangles.py`), and the backward of each rectangle, called with the merged o and l, gives its exact part of the
gradient.

The function is registered with transformers as `NAME`; how a row is attended to travels with the call as the keyword
`row_layout`. A row of one path is one causal rectangle: the plain kernel and nothing else. On CUDA a row with many
forks runs in one block-sparse kernel instead (`block_sparse.py`), which is faster there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from traceforge.models import block_sparse, rectangles
from traceforge.models.kernels import Task, assign_kernels
from traceforge.samples.rows import Row, attention_pieces

NAME = "traceforge_tree"
LAYOUT_KEYWORD = "row_layout"
_FORKS_FOR_BLOCK_SPARSE = 8


@dataclass(frozen=True)
class RowLayout:
    """How a row is attended to: as rectangles, or by a block mask where there is one."""

    tasks: tuple[Task, ...]
    block_mask: Any = None

    def kernels(self) -> set[str]:
        """Return the names of the kernels that run it."""
        return {task.kernel.name for task in self.tasks} if self.block_mask is None else {block_sparse.NAME}


def layout_of(row: Row, device: torch.device, dtype: torch.dtype, head_size: int) -> RowLayout:
    """Return how `row` runs on a device in a dtype."""
    if runs_block_sparse(row, device, dtype):
        return RowLayout((), block_sparse.block_mask(row, device))
    return RowLayout(assign_kernels(attention_pieces(row.paths), device, dtype, head_size))


def runs_block_sparse(row: Row, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a row takes the block-sparse kernel: many forks, CUDA, 16-bit."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and narrow and row.num_forks >= _FORKS_FOR_BLOCK_SPARSE


def tree_attention(
    module: nn.Module,
    query_1HTK: Tensor,
    key_1GTK: Tensor,
    value_1GTK: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [1, T, H, K] of a row, as transformers' attention interface wants it.

    Identity: the same as running each sample alone, up to the order of summation.
    """
    layout: RowLayout | None = keywords.get(LAYOUT_KEYWORD)
    assert layout is not None, f"{NAME} was called without {LAYOUT_KEYWORD}: the model does not pass keywords on"
    assert attention_mask is None, "rows carry no padding and no mask"
    assert keywords.get("sliding_window") is None, "sliding windows are refused before the first row"
    assert dropout == 0.0, "attention dropout is refused before the first row"
    device = query_1HTK.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query_1HTK, key_1GTK, value_1GTK = (each.to(dtype) for each in (query_1HTK, key_1GTK, value_1GTK))
    scale = query_1HTK.shape[-1] ** -0.5 if scaling is None else scaling
    if layout.block_mask is not None:
        output_1HTK = block_sparse.block_sparse_attention(query_1HTK, key_1GTK, value_1GTK, layout.block_mask, scale)
        return output_1HTK.transpose(1, 2), None
    output_1HTK = _MergedPieces.apply(query_1HTK, key_1GTK, value_1GTK, layout.tasks, scale)
    return output_1HTK.transpose(1, 2), None


class _MergedPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tasks: tuple[Task, ...], scale: float) -> Tensor:
        output, logsumexp = rectangles.attend(query, key, value, tasks, scale)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.tasks, ctx.scale = tasks, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        found = rectangles.attend_backward(grad, (query, key, value), output, logsumexp, ctx.tasks, ctx.scale)
        return (*found, None, None)


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **keywords: Any) -> None:
    """Refuse a padding mask: without this, transformers would drop it silently for a custom attention function."""
    assert attention_mask is None, "rows carry no padding and no mask"


def register() -> None:
    """Make `NAME` known to transformers; safe to call again."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def why_not_rows(config: PretrainedConfig) -> str | None:
    """Return why several samples cannot stand in one row for this model, or None.

    Read from the *effective* configuration: a window on the past, attention that is not softmax attention over the
    whole past, RoPE frequencies that depend on the longest position in the batch, a router whose losses and capacity
    see the whole row, or attention dropout.
    """
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    windowed = any("sliding" in kind or "chunked" in kind for kind in layer_types)
    if getattr(config, "layer_types", None) is None:
        windowed = window is not None and getattr(config, "use_sliding_window", True)
    if windowed:
        return f"sliding-window attention ({window} tokens)"
    other = layer_types - {"full_attention"}
    if other:
        return f"layers that are not plain attention: {', '.join(sorted(other))}"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    if kind in {"dynamic", "longrope"}:
        return f"RoPE type {kind!r}: its frequencies depend on the longest position in the batch"
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        return "mixture of experts: router losses and capacity see the whole row"
    if getattr(config, "attention_dropout", 0.0):
        return f"attention dropout ({config.attention_dropout})"
    return None
