"""Attention over a row: each path attends to itself, causally, through the plain kernel of the device.

A row is a forest of paths (see `samples/rows.py`). Every path here is a tree of its own, so its attention is one
causal piece on one contiguous range; no mask exists and nothing is padded. The function is registered with
transformers under `NAME`, and the layout travels with the call as the keyword `row_paths`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from traceforge.samples.rows import Path

NAME = "traceforge_tree"
LAYOUT_KEYWORD = "row_paths"


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

    Identity: the same as running each path alone, up to the kernel's order of summation.
    """
    paths: Sequence[Path] | None = keywords.get(LAYOUT_KEYWORD)
    assert paths is not None, f"{NAME} was called without {LAYOUT_KEYWORD}: the model does not pass keywords on"
    assert attention_mask is None, "rows carry no padding and no mask"
    assert keywords.get("sliding_window") is None, "sliding windows are refused before the first row"
    assert all(path.parent < 0 for path in paths), "forked paths need shared-prefix attention"
    grouped = query_1HTK.shape[1] != key_1GTK.shape[1]
    pieces = [
        torch.nn.functional.scaled_dot_product_attention(
            query_1HTK[:, :, path.start : path.stop],
            key_1GTK[:, :, path.start : path.stop],
            value_1GTK[:, :, path.start : path.stop],
            is_causal=True,
            scale=scaling,
            dropout_p=dropout,
            enable_gqa=grouped,
        )
        for path in paths
    ]
    output_1HTK = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
    return output_1HTK.transpose(1, 2).contiguous(), None


def _no_mask(*args: Any, attention_mask: Tensor | None = None, **keywords: Any) -> None:
    """Refuse a padding mask: without this, transformers would drop it silently for a custom attention function."""
    assert attention_mask is None, "rows carry no padding and no mask"


def register() -> None:
    """Make `NAME` known to transformers; safe to call again."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def why_not_tree(config: PretrainedConfig, *, max_tokens: int) -> str | None:
    """Return why several samples cannot stand in one row for this model, or None.

    Read from the *effective* configuration: a window shorter than the samples, attention that is not softmax
    attention over the whole past, RoPE frequencies that depend on the longest position in the batch, or a router whose
    capacity is shared by the tokens of a row.
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
    return None
