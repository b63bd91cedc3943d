"""Weighted negative log-likelihood: the SFT objective."""

from __future__ import annotations

from torch import Tensor


def weighted_nll(logp_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return `-sum(weights * logp)`, a scalar in nats.

    A sum, never a mean: the caller divides by the token weights of the whole update, so no cut into micro-batches or
    rows can change the result.

    Args:
        logp_N: log-probability of each trained token.
        weights_N: its weight; 2 counts it twice (two samples train it), in the denominator too.
    """
    return -(weights_N.to(logp_N.dtype) * logp_N).sum()


def check_same_length(*vectors: Tensor) -> None:
    """Refuse anything but vectors of one length.

    Raises:
        ValueError: the shapes differ or are no vectors; it names them.
    """
    shapes = [tuple(each.shape) for each in vectors]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ValueError(f"expected vectors of one length, got shapes {shapes}")
