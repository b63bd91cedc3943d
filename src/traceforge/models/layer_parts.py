"""What a lean layer is made of, and how one row runs through the layers. See `layers.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from traceforge import lean_sizes
from traceforge.lean_sizes import key_heads_per_pass
from traceforge.memory.folded_linear import FoldedLinear
from traceforge.memory.offload import tiles_of
from traceforge.memory.weights import FrozenWeight
from traceforge.models.kernels import Task


class Norm(NamedTuple):
    """An RMS norm: weight and epsilon."""

    weight_D: Tensor
    eps: float


@dataclass(frozen=True)
class LayerShape:
    """Sizes that all layers of a model share."""

    hidden: int
    mlp: int
    heads: int
    key_heads: int
    head_size: int
    scale: float
    """Factor on attention scores."""

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all key heads together."""
        return self.key_heads * self.head_size


@dataclass
class LayerParts:
    """One layer's linears and norms; the query and key norms of a head exist in some families only."""

    qkv: FoldedLinear
    out: FoldedLinear
    gate_up: FoldedLinear
    down: FoldedLinear
    input_norm: Norm
    mlp_norm: Norm
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    def groups(self) -> tuple[FoldedLinear, ...]:
        """Return the four folded linears in the order in which their weights are held."""
        return (self.qkv, self.out, self.gate_up, self.down)

    def parameters(self) -> list[nn.Parameter]:
        """Return the adapters' parameters in the order in which `LeanLayers.backward` returns gradients."""
        return [parameter for group in self.groups() for parameter in group.parameters()]

    def weights(self) -> list[FrozenWeight]:
        """Return the frozen weights in order."""
        return [linear.weight for group in self.groups() for linear in group.linears]


@dataclass
class RowPass:
    """One row on its way through the layers.

    Args:
        tasks: attention's rectangles.
        cos_TK, sin_TK: RoPE's angles at each token's depth.
        tiles: ranges of tokens that are computed together.
        passes: ranges of key heads that attention's backward takes together.
        recomputes_attention: whether attention's output is computed again instead of kept on the host.
        generation: what the store calls this row; None = nothing is kept, there will be no backward.
    """

    tasks: tuple[Task, ...]
    cos_TK: Tensor
    sin_TK: Tensor
    tiles: list[slice]
    passes: list[slice]
    recomputes_attention: bool
    generation: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return self.tiles[-1].stop

    @property
    def names(self) -> list[str]:
        """Names under which attention's output of each pass waits."""
        return [f"attention {number}" for number in range(len(self.passes))]


def plan_row(
    shape: LayerShape, tasks: tuple[Task, ...], angles: tuple[Tensor, Tensor], *, tile_tokens: int, recompute: bool
) -> RowPass:
    """Return how a row runs, before anything is kept of it."""
    tokens = angles[0].shape[0]
    together = key_heads_per_pass(shape.heads, shape.key_heads, tokens, full_pass=lean_sizes.FULL_PASS)
    passes = [slice(start, start + together) for start in range(0, shape.key_heads, together)]
    return RowPass(tasks, *angles, tiles_of(tokens, tile_tokens), passes, recompute)
