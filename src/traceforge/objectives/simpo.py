"""SimPO: the preference objective without a reference model, on length-normalised log-probabilities."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from traceforge.objectives.nll import check_same_length


def simpo_loss(
    chosen_logp_P: Tensor, rejected_logp_P: Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the SimPO loss summed over pairs, and the reward margin of each pair.

    With m = mean(chosen) - mean(rejected) and z = beta m - gamma, a pair's loss is -log sigmoid(z); label smoothing s
    makes it -(1 - s) log sigmoid(z) - s log sigmoid(-z). It is a sum: the caller divides by the pairs of the whole
    update, so no cut into micro-batches can change it. Finite for any finite z.

    Args:
        chosen_logp_P: weighted mean log-probability per trained token of each chosen branch, in nats.
        rejected_logp_P: the same for the rejected branches, in the same order.
        beta: reward scale.
        gamma: target margin in reward units (absolute; the authors' `gamma_beta_ratio` is gamma / beta).
        label_smoothing: chance that a label is the wrong way round.

    Raises:
        ValueError: the inputs are not two vectors of one length.

    Source: SimPO, arXiv 2405.14734, eq. 6. TRL's `simpo_gamma` and Liger's `gamma` mean the same.
    """
    check_same_length(chosen_logp_P, rejected_logp_P)
    margin_P = beta * (chosen_logp_P - rejected_logp_P)
    z_P = margin_P - gamma
    loss_P = -(1 - label_smoothing) * logsigmoid(z_P) - label_smoothing * logsigmoid(-z_P)
    return loss_P.sum(), margin_P.detach()
