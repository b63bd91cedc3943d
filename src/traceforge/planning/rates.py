"""How long a row takes, from rates that were measured on a card.

A row's time is its operations at the card's measured rates, divided by the share of that which whole updates reach.
Operations of the lean path: every linear forward and for the input gradient, Q, K, V, O, gate and up once more in the
backward pass; attention forward, and 5/2 of it backward; the output layer twice, at trained positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from traceforge.errors import UsageError
from traceforge.planning.setup import Setup
from traceforge.samples.model_shape import ModelShape

_TERA = 1e12
_BACKWARD_OF_FORWARD = 2.5


@dataclass(frozen=True)
class Rates:
    """Measured rates of a card, in bfloat16.

    Args:
        matmul_tflops: of large products.
        attention_forward_tflops, attention_backward_tflops: causal, heads of 128.
        reached: share of these rates that a whole update reaches.
        power_w: mean draw in updates; None = not measured.
    """

    matmul_tflops: float
    attention_forward_tflops: float
    attention_backward_tflops: float
    reached: float
    power_w: float | None = None


KNOWN_CARDS = {
    "H200": Rates(740.0, 607.0, 522.0, reached=0.89),
}
"""Cards that have been measured, by a part of their name; benchmarks/gpu_plan.py measures another."""


@dataclass(frozen=True)
class Estimate:
    """Of one pass over the longest row, forward and backward. `energy_j`: None where the card's power is not known."""

    seconds: float
    energy_j: float | None


def rates_of(card: str) -> Rates:
    """Return the rates of a card by a part of its name.

    Raises:
        UsageError: it has not been measured.
    """
    for name, rates in KNOWN_CARDS.items():
        if name.lower() in card.lower():
            return rates
    raise UsageError(f"--card {card}: not measured; known: {', '.join(KNOWN_CARDS)}", hint="leave out --card")


def estimate(shape: ModelShape, setup: Setup, rates: Rates) -> Estimate:
    """Return time and energy of one row as one causal sequence: forks make it cheaper."""
    tokens = setup.row_tokens
    linear = 2.0 * shape.linear_parameters() * tokens
    again = linear - 2.0 * shape.layers * shape.hidden * shape.intermediate * tokens  # all but down_proj
    attention = 4.0 * shape.layers * shape.queries * tokens * tokens / 2
    head = 2 * 2.0 * shape.hidden * shape.vocabulary * setup.target_tokens
    recomputed = attention if setup.recompute_attention else 0.0
    seconds = (
        (2 * linear + again + head) / rates.matmul_tflops
        + (attention + recomputed) / rates.attention_forward_tflops
        + _BACKWARD_OF_FORWARD * attention / rates.attention_backward_tflops
    ) / (_TERA * rates.reached)
    return Estimate(seconds, None if rates.power_w is None else seconds * rates.power_w)
