"""The shape of a model, read from its config.json: what its forward pass costs, without its weights.

Cost     Multiply-adds count as two operations. Linears: each computed token. Attention: each visible (query, key)
         pair. Output layer: each trained token, because logits exist only there. Norms, RoPE and the adapter are left
         out. The backward pass is about twice as much in each part, so factors of saved work hold for it, too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec

_GATED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder with gated MLPs (Llama, Mistral, Qwen2, Qwen3). `layers` are counted; the rest are widths."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    key_value_heads: int
    head_size: int

    def forward_flops(self, *, tokens: int, pairs: int, targets: int) -> float:
        """Return the operations of one forward pass over computed tokens, visible pairs and trained tokens."""
        attended = self.heads * self.head_size
        grouped = self.key_value_heads * self.head_size
        weights = self.hidden * (2 * attended + 2 * grouped + 3 * self.intermediate)
        per_layer = 2.0 * weights * tokens + 4.0 * attended * pairs
        return self.layers * per_layer + 2.0 * self.hidden * self.vocabulary * targets


def read_model_shape(name_or_path: str, *, revision: str | None = None) -> ModelShape | None:
    """Return the shape that the config.json of a folder or hub id names.

    None if there is no such file or it is of another family: a guessed cost is worse than none.
    """
    raw = _config(name_or_path, revision)
    if raw is None or raw.get("model_type") not in _GATED_FAMILIES:
        return None
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        return ModelShape(
            layers=int(raw["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(raw["intermediate_size"]),
            vocabulary=int(raw["vocab_size"]),
            heads=heads,
            key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_size=int(raw.get("head_dim") or hidden // heads),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _config(name_or_path: str, revision: str | None) -> dict[str, Any] | None:
    path = Path(name_or_path) / "config.json"
    if not Path(name_or_path).is_dir() and _HUB_ID.fullmatch(name_or_path):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            path = Path(hf_hub_download(name_or_path, "config.json", revision=revision))
        except (HfHubHTTPError, OSError, ValueError):
            return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None
