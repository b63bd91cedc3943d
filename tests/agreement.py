"""How far an update lies from the plain samples run one by one: one measure for tests that expect it to be small, and
for tests that plant a bug and expect it to be large.

`update.plan_update` and `update.backward` are looked up at the call, so a planted bug is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.tiny_models import gradients, reference_gradients
from traceforge.models.language_model import LanguageModel
from traceforge.oracles.record import relative_l2
from traceforge.samples.tokens import Sample
from traceforge.training import update as update_module

LOSS_RELATIVE = 1e-6
GRADIENT_RELATIVE_L2 = 1e-4
"""What float32 sums in another order may differ by; see tests/equivalence."""


@dataclass(frozen=True)
class UpdateDifference:
    """Distance of one update's loss and gradients from the reference.

    Args:
        loss: relative.
        gradient: largest relative L2 over the trained tensors.
        tensor: the tensor where it was found.
        smallest: smallest L2 norm of a reference gradient; 0 would prove nothing for its tensor.
    """

    loss: float
    gradient: float
    tensor: str
    smallest: float

    def agrees(self, *, loss: float = LOSS_RELATIVE, gradient: float = GRADIENT_RELATIVE_L2) -> bool:
        """Return whether both lie within their tolerances; what is not finite never does."""
        return self.loss <= loss and self.gradient <= gradient and self.smallest > 0


def update_difference(
    model: LanguageModel, samples: Sequence[Sample], *, tokens_per_row: int, reference: str = "eager"
) -> UpdateDifference:
    """Return how far `model`'s update lies from the plain-torch reference; leaves no gradient behind."""
    wanted_loss, wanted = reference_gradients(model, samples, attention=reference)
    update = update_module.plan_update(model, samples, tokens_per_row=tokens_per_row)
    loss = update_module.backward(model, update)
    found = gradients(model.model)
    model.model.zero_grad(set_to_none=True)
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    gradient, tensor = max((relative_l2(found[name], wanted[name]), name) for name in wanted)
    return UpdateDifference(
        loss=abs(loss - wanted_loss) / abs(wanted_loss),
        gradient=gradient,
        tensor=tensor,
        smallest=min(float(each.norm()) for each in wanted.values()),
    )
