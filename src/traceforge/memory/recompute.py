"""Per-layer recompute: keep each layer's input, compute the layer again in the backward pass.

The inputs stay on the device, or wait in page-locked host memory (`ActivationStore`) and come back one layer ahead of
their use. Independent of the training flag, so an evaluation in between cannot switch it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from traceforge.errors import TrainingError
from traceforge.memory.offload import ActivationStore, Saved


def recompute_layers(layers: Iterable[nn.Module], store: ActivationStore | None = None) -> int:
    """Wrap the forward of each layer in place and return how many were wrapped.

    Args:
        layers: decoder layers; the hidden states are the first positional argument and the only result.
        store: where inputs wait; None = on the device.

    Cost: saves every activation inside a layer, and with a store the inputs too; adds one forward pass of the layers
        per backward pass.
    Identity: bitwise on the CPU; dropout masks are replayed from the saved generator state.
    """
    wrapped = list(layers)
    for number, layer in enumerate(wrapped):
        place = None if store is None else _Place(store, number, len(wrapped))
        layer.forward = _recomputed(layer.forward) if place is None else _offloaded(layer.forward, place)
    return len(wrapped)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return run


@dataclass(frozen=True)
class _Place:
    """A layer's place in the store."""

    store: ActivationStore
    number: int
    num_layers: int


def _offloaded(forward: Callable[..., Any], place: _Place) -> Callable[..., Any]:
    @wraps(forward)
    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(hidden, *args, **kwargs)
        # The first layer's input needs no gradient where the embedding is frozen; its parameters do.
        anchor = torch.empty(0, device=hidden.device, requires_grad=True)
        return _Offloaded.apply(hidden, anchor, lambda x: forward(x, *args, **kwargs), place)

    return run


class _Offloaded(torch.autograd.Function):
    """One layer whose input waits on the host. Its parameters get their gradient inside its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor, layer: Callable[[Tensor], Tensor], place: _Place) -> Tensor:
        store = place.store
        if place.number == 0:
            plan = {"input": Saved(tuple(hidden.shape), hidden.dtype, by_tile=False)}
            store.begin(place.num_layers, plan, [])
        ctx.layer, ctx.place, ctx.generation = layer, place, store.generation
        ctx.random, ctx.narrow = _random_state(hidden.device), _autocast_state(hidden.device)
        store.save(place.number, "input", hidden)
        output = layer(hidden)
        store.settle()
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        place: _Place = ctx.place
        if ctx.generation != place.store.generation:
            raise TrainingError(
                "inputs of one row wait on the host: another forward pass with gradients came before this backward",
                hint="run backward after each forward pass, or set memory.offload_inputs = false",
            )
        hidden = place.store.take(place.number)["input"].wait()
        place.store.prefetch(place.number - 1)
        hidden.requires_grad_(ctx.needs_input_grad[0])
        device = hidden.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), torch.autocast(device.type, **ctx.narrow):
            _set_random_state(device, ctx.random)
            output = ctx.layer(hidden)
        torch.autograd.backward(output, grad)
        return hidden.grad, None, None, None


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def _autocast_state(device: torch.device) -> dict[str, Any]:
    return {
        "enabled": torch.is_autocast_enabled(device.type),
        "dtype": torch.get_autocast_dtype(device.type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
