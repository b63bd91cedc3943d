"""DPO: the preference objective against a reference, on summed log-probabilities."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from traceforge.objectives.nll import check_same_length


def dpo_loss(
    chosen_logp_P: Tensor,
    rejected_logp_P: Tensor,
    reference_chosen_logp_P: Tensor,
    reference_rejected_logp_P: Tensor,
    *,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Return the DPO loss summed over pairs, and the reward margin of each pair.

    A pair's loss is -log sigmoid(beta [(chosen - reference chosen) - (rejected - reference rejected)]).

    Args:
        chosen_logp_P: weighted *sum* of the log-probabilities of each chosen branch, in nats.
        rejected_logp_P: the same for the rejected branches.
        reference_chosen_logp_P: the chosen branches under the reference: the adapter that training started from.
        reference_rejected_logp_P: the rejected branches under the reference.
        beta: reward scale.

    Raises:
        ValueError: the inputs are not vectors of one length.

    Source: DPO, arXiv 2305.18290, eq. 7.
    """
    check_same_length(chosen_logp_P, rejected_logp_P, reference_chosen_logp_P, reference_rejected_logp_P)
    margin_P = beta * ((chosen_logp_P - reference_chosen_logp_P) - (rejected_logp_P - reference_rejected_logp_P))
    return -logsigmoid(margin_P).sum(), margin_P.detach()
