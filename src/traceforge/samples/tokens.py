"""A sample: the token ids of one prompt with its ending, and how much each token is trained.

Weight   `weights_S[t]` says how strongly token t is a target: 0 = context only. The log-probability of token t is read
         at its parent, token t - 1, so the first token can never be a target.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One tokenised sample.

    Args:
        sample_id: `{trajectory_id}#{turn}` for turns; `{file stem}#{row}` for instruction and prompt-completion rows.
        group_id: the group an update never splits: the trajectory, or the sample itself.
        task_id: what the split into train and evaluation keeps together.
        token_ids_S: the full sequence, prompt first.
        weights_S: training weight of each token; `weights_S[0]` is 0.
        cuts: reason codes of everything that was shortened, cut or merged in this sample, in order.
    """

    sample_id: str
    group_id: str
    task_id: str
    token_ids_S: IntArray
    weights_S: FloatArray
    cuts: tuple[str, ...] = field(default=())

    @property
    def num_tokens(self) -> int:
        """Length of the sequence in tokens."""
        return int(self.token_ids_S.shape[0])

    @property
    def samples(self) -> tuple[Sample]:
        """Itself: what stands in a data set is one sequence here, and several in a preference pair."""
        return (self,)

    @property
    def num_trained_tokens(self) -> int:
        """How many tokens are targets."""
        return int(np.count_nonzero(self.weights_S))

    @property
    def total_weight(self) -> float:
        """Sum of the token weights: this sample's part of the SFT denominator."""
        return float(self.weights_S.sum())
