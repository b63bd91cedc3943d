"""Frozen weights of the layers: as loaded, on the device or streamed layer by layer from the host.

A weight is a few *parts* (tensors that can be moved as bytes) and a way to write them out as a matrix in the dtype of
the arithmetic. Resident parts stay where they are. Streamed parts lie in one page-locked slab, a layer's in one block,
of which at most two are on the device.

Cost     Streaming: saves the bytes of all layers but two on the device; each layer crosses the bus once per pass over
         it. Writing out: one pass over memory per use.
Identity Bitwise: the same numbers, moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from traceforge.memory.layer_maths import kernels_for
from traceforge.memory.offload import Lanes
from traceforge.memory.pinned import Slab

_ALIGNMENT = 512


class FrozenWeight(Protocol):
    """A matrix [out, in] that is never trained."""

    shape: tuple[int, int]
    parts: tuple[Tensor, ...]

    def write(self, parts: tuple[Tensor, ...], out_OI: Tensor) -> None:
        """Write the matrix, whose parts now lie at `parts`, to `out_OI` (rows may be strided)."""
        ...


class DenseWeight:
    """A weight held in one floating dtype."""

    def __init__(self, weight_OI: Tensor) -> None:
        self.shape = (weight_OI.shape[0], weight_OI.shape[1])
        self.parts: tuple[Tensor, ...] = (weight_OI.detach(),)

    def write(self, parts: tuple[Tensor, ...], out_OI: Tensor) -> None:
        """See `FrozenWeight.write`."""
        out_OI.copy_(parts[0])


@dataclass(frozen=True)
class Nf4Constants:
    """What all blocks of an NF4 weight share; see bitsandbytes' `QuantState`."""

    levels: Tensor
    absmax_levels: Tensor | None
    offset: Tensor | None
    block_size: int
    block_size2: int


class Nf4Weight:
    """A weight in bitsandbytes' NF4: two values a byte, one scale a block, the scales themselves in 8 bits or float32.

    Source: bitsandbytes `functional.QuantState`; `absmax`, `state2.absmax`, `code`, `state2.code`, `offset` there.
    """

    def __init__(self, packed: Tensor, state: Any) -> None:
        assert state.quant_type == "nf4", "other 4-bit types are refused when the model is made lean"
        self._state = state
        self.shape = (int(state.shape[0]), int(state.shape[1]))
        nested = state.state2
        self.parts: tuple[Tensor, ...] = (packed.reshape(-1), state.absmax)
        if nested is not None:
            self.parts += (nested.absmax,)
        self.constants = Nf4Constants(
            state.code,
            None if nested is None else nested.code,
            None if nested is None else state.offset.reshape(1),
            state.blocksize,
            1 if nested is None else nested.blocksize,
        )

    def write(self, parts: tuple[Tensor, ...], out_OI: Tensor) -> None:
        """See `FrozenWeight.write`."""
        kernels = kernels_for(out_OI)
        if kernels is not None:
            kernels.nf4(parts, self.constants, out_OI)
            return
        scales = self._scales(parts)
        both = torch.stack((parts[0] >> 4, parts[0] & 15), dim=-1).reshape(-1, self.constants.block_size)
        out_OI.copy_((self.constants.levels[both.int()] * scales[:, None]).reshape(self.shape))

    def _scales(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Return the float32 scale of each block."""
        constants = self.constants
        if constants.absmax_levels is None or constants.offset is None:
            return parts[1]
        outer = parts[2].repeat_interleave(constants.block_size2)[: parts[1].numel()]
        return constants.absmax_levels[parts[1].int()] * outer + constants.offset


class LayerWeights:
    """The frozen weights of all layers, and where they are.

    Args:
        layers: the weights of each layer, in an order that the layer knows.
        lanes: side streams for copies.
        slab: where streamed parts lie; None = all stay where they are.
    """

    def __init__(self, layers: list[list[FrozenWeight]], lanes: Lanes, slab: Slab | None) -> None:
        self._layers, self._lanes, self._slab = layers, lanes, slab
        self._blocks: dict[int, tuple[Tensor, Any]] = {}
        self._places: list[tuple[int, int, list[list[tuple[int, Tensor]]]]] = []
        if slab is not None:
            self._move_to(slab)

    @property
    def is_streamed(self) -> bool:
        """Whether the weights lie on the host."""
        return self._slab is not None

    def _move_to(self, slab: Slab) -> None:
        """Copy every part to the slab and let go of it where it was."""
        start = 0
        for weights in self._layers:
            offset, places = 0, []
            for weight in weights:
                found = []
                for part in weight.parts:
                    found.append((offset, part))
                    offset += -(-part.numel() * part.element_size() // _ALIGNMENT) * _ALIGNMENT
                places.append(found)
            self._places.append((start, offset, places))
            start += offset
        slab.reserve(start)
        for number, (begin, size, places) in enumerate(self._places):
            for weight, found in zip(self._layers[number], places, strict=True):
                for offset, part in found:
                    slab.view(begin + offset, tuple(part.shape), part.dtype).copy_(part)
                weight.parts = tuple(torch.empty(0, dtype=part.dtype, device=part.device) for _, part in found)
            shells = [[(o, torch.empty(p.shape, dtype=p.dtype, device="meta")) for o, p in f] for f in places]
            self._places[number] = (begin, size, shells)

    def prefetch(self, layer: int) -> None:
        """Start to bring a layer's block to the device; a layer that does not exist is ignored."""
        if self._slab is None or layer in self._blocks or not 0 <= layer < len(self._layers):
            return
        begin, size, _ = self._places[layer]
        block = torch.empty(size, dtype=torch.uint8, device=self._lanes.device)
        with self._lanes.towards_device():
            event = self._lanes.to_device(block, self._slab.view(begin, (size,), torch.uint8))
        self._blocks[layer] = (block, event)

    def use(self, layer: int) -> list[tuple[Tensor, ...]]:
        """Return the parts of each weight of a layer, ready to be read on the current stream."""
        if self._slab is None:
            return [weight.parts for weight in self._layers[layer]]
        self.prefetch(layer)
        block, event = self._blocks[layer]
        self._lanes.wait(event)
        found = []
        for places in self._places[layer][2]:
            parts = []
            for offset, shell in places:
                num_bytes = shell.numel() * shell.element_size()
                parts.append(block[offset : offset + num_bytes].view(shell.dtype).view(shell.shape))
            found.append(tuple(parts))
        return found

    def release(self, layer: int) -> None:
        """Let go of a layer's block on the device."""
        self._blocks.pop(layer, None)
