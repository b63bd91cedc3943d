"""What the same row would take without any technique: the accounting of textbooks.

All parameters trained by Adam in mixed precision (16-bit weights, their gradients, and in float32 a master copy with
two moments), attention's scores stored for every head and layer, every layer's input kept, all logits at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from traceforge.samples.model_shape import ModelShape

_NARROW, _WIDE = 2, 4
_UNFUSED_LOGIT = 16
"""Bytes a logit that a plain loss holds at its worst: in float32 the logits, their log-softmax, and both gradients."""


@dataclass(frozen=True)
class Textbook:
    """Bytes without techniques.

    Args:
        weights: of all parameters in 16 bits.
        gradients: the same.
        optimizer: master copy and two moments in float32.
        scores_per_head: [T, T] in 16 bits, of one head of one layer.
        scores: of all heads and layers.
        layer_inputs: [T, D] of each layer in 16 bits.
        logits: [T, V] in 16 bits.
        logits_wide: the same in float32.
        logits_unfused: what a plain loss of all of them holds.
    """

    weights: int
    gradients: int
    optimizer: int
    scores_per_head: int
    scores: int
    layer_inputs: int
    logits: int
    logits_wide: int
    logits_unfused: int

    @property
    def total(self) -> int:
        """All of it together, with the logits as a plain loss holds them."""
        return self.weights + self.gradients + self.optimizer + self.scores + self.layer_inputs + self.logits_unfused


def textbook(shape: ModelShape, tokens: int) -> Textbook:
    """Return what one sequence of `tokens` takes without techniques."""
    parameters = shape.parameters()
    per_head = _NARROW * tokens * tokens
    return Textbook(
        weights=_NARROW * parameters,
        gradients=_NARROW * parameters,
        optimizer=3 * _WIDE * parameters,
        scores_per_head=per_head,
        scores=per_head * shape.heads * shape.layers,
        layer_inputs=_NARROW * tokens * shape.hidden * shape.layers,
        logits=_NARROW * tokens * shape.vocabulary,
        logits_wide=_WIDE * tokens * shape.vocabulary,
        logits_unfused=_UNFUSED_LOGIT * tokens * shape.vocabulary,
    )
