"""Per-layer recompute: keep each layer's input, compute the layer again in the backward pass.

Independent of the training flag, so an evaluation in between cannot switch it off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_layers(layers: Iterable[nn.Module]) -> int:
    """Wrap the forward of each layer in place and return how many were wrapped.

    Cost: saves every activation inside a layer; adds one forward pass of the layers per backward pass.
    Identity: bitwise on the CPU; dropout masks are replayed from the saved generator state.
    """
    count = 0
    for layer in layers:
        layer.forward = _recomputed(layer.forward)
        count += 1
    return count


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    return run
