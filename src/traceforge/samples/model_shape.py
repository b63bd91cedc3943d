"""The shape of a model, read from its config.json: what it holds and what its forward pass costs, without its weights.

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
    """A dense decoder with gated MLPs (Llama, Mistral, Qwen2, Qwen3). `layers` are counted; the rest are widths.

    `qkv_bias`, `output_bias`, `mlp_bias`: whether those linears have biases. `head_norms`: queries and keys have an RMS
    norm of each head. `tied`: the output layer is the embedding. `positions`: most of a sample, None = not said.
    """

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    key_value_heads: int
    head_size: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    tied: bool = False
    positions: int | None = None

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all key heads together; values have the same."""
        return self.key_value_heads * self.head_size

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each linear of a layer, by the name that adapters use."""
        return {
            "q_proj": (self.queries, self.hidden),
            "k_proj": (self.keys, self.hidden),
            "v_proj": (self.keys, self.hidden),
            "o_proj": (self.hidden, self.queries),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    def linear_parameters(self) -> int:
        """Return the weights of the linears of all layers, without biases: what 4-bit quantisation takes."""
        return self.layers * sum(outputs * inputs for outputs, inputs in self.linears().values())

    def vocabulary_parameters(self) -> int:
        """Return the weights of embedding and output layer; one table if they are tied."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    def small_parameters(self) -> int:
        """Return the weights of norms and biases."""
        biases = (
            self.qkv_bias * (self.queries + 2 * self.keys)
            + self.output_bias * self.hidden
            + self.mlp_bias * (2 * self.intermediate + self.hidden)
        )
        norms = 2 * self.hidden + self.head_norms * 2 * self.head_size
        return self.layers * (biases + norms) + self.hidden

    def parameters(self) -> int:
        """Return all weights of the model."""
        return self.linear_parameters() + self.vocabulary_parameters() + self.small_parameters()

    def adapter_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Return the weights of LoRA adapters of a rank on the named linears of every layer."""
        linears = self.linears()
        return self.layers * sum(rank * sum(linears[name]) for name in targets if name in linears)

    def forward_flops(self, *, tokens: int, pairs: int, targets: int) -> float:
        """Return the operations of one forward pass over computed tokens, visible pairs and trained tokens."""
        per_layer = 2.0 * self.linear_parameters() / self.layers * tokens + 4.0 * self.queries * pairs
        return self.layers * per_layer + 2.0 * self.hidden * self.vocabulary * targets


def read_model_shape(name_or_path: str, *, revision: str | None = None) -> ModelShape | None:
    """Return the shape that the config.json of a folder or hub id names.

    None if there is no such file or it is of another family: a guessed cost is worse than none.
    """
    raw = _config(name_or_path, revision)
    return None if raw is None else shape_of(raw)


def shape_of(raw: dict[str, Any]) -> ModelShape | None:
    """Return the shape that the values of a config.json name; None if they are of another family or not whole."""
    family = raw.get("model_type")
    if family not in _GATED_FAMILIES:
        return None
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        positions = raw.get("max_position_embeddings")
        biased = bool(raw.get("attention_bias", False)) and family in {"llama", "qwen3"}
        return ModelShape(
            layers=int(raw["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(raw["intermediate_size"]),
            vocabulary=int(raw["vocab_size"]),
            heads=heads,
            key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_size=int(raw.get("head_dim") or hidden // heads),
            qkv_bias=biased or family == "qwen2",
            output_bias=biased,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
            head_norms=family == "qwen3",
            tied=bool(raw.get("tie_word_embeddings", False)),
            positions=None if positions is None else int(positions),
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
