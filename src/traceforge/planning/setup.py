"""What of a run file decides how much memory a run takes: one flat record, in which techniques can be turned off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from traceforge.config import RunConfig
from traceforge.lean_sizes import WINDOW_WEIGHTS
from traceforge.samples.model_shape import ModelShape

Device = Literal["cuda", "cpu"]
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_NF4_BITS = 4
_NF4_BLOCK, _NF4_OUTER_BLOCK = 64, 256
LARGEST_HEAP_BLOCK = 32 * 2**20
"""Where glibc's own limit stops growing (DEFAULT_MMAP_THRESHOLD_MAX of a 64-bit system)."""


@dataclass(frozen=True)
class Setup:
    """One way of running one row.

    Args:
        value_bytes: of the dtype of the arithmetic.
        lean: layers by hand, activations on the host; else the model's own layers.
        nf4: frozen linears in 4 bits.
        rank: of the LoRA adapters; None = all parameters are trained, in float32.
        moments_bytes: of both Adam moments of one weight.
        streamed: lean path: frozen weights on the host.
        recompute_attention: lean path: attention again in the backward pass instead of its output on the host.
        tile_tokens: lean path: tokens of a tile.
        recompute_layers: generic path: only layer inputs are kept.
        chunk_tokens: trained positions whose logits exist at one time; None = the logits of all positions.
        score_matrix: attention as softmax over a stored [T, T] matrix of each head.
        row_tokens: tokens of the longest row.
        target_tokens: trained tokens of it.
        single_row: an update is one row, so that no gradient lies there while its forward pass runs.
    """

    device: Device
    value_bytes: int
    lean: bool
    nf4: bool
    rank: int | None
    targets: tuple[str, ...]
    moments_bytes: int
    streamed: bool
    recompute_attention: bool
    tile_tokens: int
    recompute_layers: bool
    chunk_tokens: int | None
    score_matrix: bool
    row_tokens: int
    target_tokens: int
    single_row: bool
    moments_on_host: bool = False
    """Adam's moments in page-locked host memory, visiting the card a window at a time."""
    inputs_on_host: bool = False
    """Generic path: the inputs of recomputed layers in page-locked host memory."""
    heap_block_bytes: int = LARGEST_HEAP_BLOCK
    """CPU: larger blocks go back to the system when they are freed."""

    def moments_on_device(self, shape: ModelShape) -> int:
        """Return the bytes of Adam's moments where the model computes; on the CPU the host is that place."""
        away = self.moments_on_host and self.device == "cuda"
        return 0 if away else self.moments_bytes * self.trained_parameters(shape)

    def moments_on_pinned_host(self, shape: ModelShape) -> int:
        """Return the bytes of Adam's moments in page-locked host memory beside a card."""
        away = self.moments_on_host and self.device == "cuda"
        return self.moments_bytes * self.trained_parameters(shape) if away else 0

    def optimizer_workspace(self, shape: ModelShape) -> int:
        """Return what Adam's arithmetic takes beside moments and gradients.

        All weights at once on a card, or two windows of their moments; one weight after the other on the CPU.
        """
        if self.device == "cuda":
            window = min(WINDOW_WEIGHTS, self.trained_parameters(shape))
            return (4 + 2 * self.moments_bytes) * window if self.moments_on_host else 4 * self.trained_parameters(shape)
        if self.rank is not None:
            return 4 * self.rank * shape.intermediate
        return 4 * max(shape.vocabulary, shape.intermediate) * shape.hidden

    def trained_parameters(self, shape: ModelShape) -> int:
        """Return the weights that are trained."""
        return shape.parameters() if self.rank is None else shape.adapter_parameters(self.rank, self.targets)

    def frozen_layer_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of the layers' frozen linears as they are held; 0 if they are trained."""
        if self.rank is None:
            return 0
        if not self.nf4:
            return self.value_bytes * shape.linear_parameters()
        return nf4_bytes(shape.linear_parameters())

    def vocabulary_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of embedding and output layer; 0 if they are trained."""
        return 0 if self.rank is None else self.value_bytes * shape.vocabulary_parameters()

    def small_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of norms and biases; 0 if they are trained."""
        return 0 if self.rank is None else self.value_bytes * shape.small_parameters()


def nf4_bytes(weights: int) -> int:
    """Return the bytes of NF4 with double quantisation: 4 bits a weight, 8 a block's scale, 32 a block of scales."""
    scales = weights // _NF4_BLOCK
    return weights * _NF4_BITS // 8 + scales + 4 * (scales // _NF4_OUTER_BLOCK)


def setup_of(
    config: RunConfig,
    shape: ModelShape,
    device: Device,
    *,
    row_tokens: int | None = None,
    target_tokens: int | None = None,
    heap_block_bytes: int = LARGEST_HEAP_BLOCK,
) -> Setup:
    """Return the setup that a run file comes to on a device.

    Args:
        row_tokens: tokens of the longest row; None = the longest that the settings allow.
        target_tokens: trained tokens of it; None = all.
        heap_block_bytes: see `Setup`.
    """
    memory, adapter = config.memory, config.adapter
    tokens = config.tokens_per_row if row_tokens is None else row_tokens
    return Setup(
        device=device,
        value_bytes=_BYTES[config.model.dtype],
        lean=takes_lean_path(config, device),
        nf4=config.model.quantization == "nf4",
        rank=adapter.rank if adapter.kind == "lora" else None,
        targets=adapter.target_modules,
        moments_bytes=2 if config.optimizer.name == "adamw_8bit" else 8,
        streamed=memory.placement == "streamed",
        recompute_attention=memory.recompute_attention,
        tile_tokens=memory.tile_tokens,
        recompute_layers=memory.recompute_layers,
        chunk_tokens=memory.logits_chunk_tokens,
        score_matrix=False,
        row_tokens=tokens,
        target_tokens=tokens if target_tokens is None else target_tokens,
        single_row=config.items_per_update == 1 and config.data.group == "none",
        moments_on_host=config.optimizer.offload_state,
        inputs_on_host=memory.offload_inputs,
        heap_block_bytes=heap_block_bytes,
    )


def takes_lean_path(config: RunConfig, device: Device) -> bool:
    """Return whether the settings put rows on the lean path of this device (all families that are planned have one)."""
    memory = config.memory
    if memory.path == "lean" or memory.placement == "streamed" or memory.recompute_attention:
        return True
    admitted = (
        config.adapter.kind == "lora"
        and config.adapter.dropout == 0
        and config.model.attention != "plain"
        and not memory.recompute_layers
    )
    return device == "cuda" and memory.path == "auto" and admitted
