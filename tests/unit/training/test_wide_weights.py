"""Large frozen weights that ended up in float32 beside 16-bit arithmetic are named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from traceforge.models.language_model import LanguageModel
from traceforge.training.measure import wide_frozen_weights


@pytest.mark.parametrize(
    ("arithmetic", "frozen", "rows", "named"),
    [
        (torch.bfloat16, torch.float32, 30_000, True),
        (torch.bfloat16, torch.bfloat16, 30_000, False),
        (torch.bfloat16, torch.float32, 1_000, False),
        (torch.float32, torch.float32, 30_000, False),
    ],
)
def test_a_frozen_table_of_more_than_100_megabytes_in_float32_is_named(arithmetic, frozen, rows, named):
    network = nn.Sequential(nn.Embedding(rows, 1024, device="meta", dtype=frozen), nn.Linear(8, 8)).requires_grad_(
        False
    )
    network[1].requires_grad_(True)
    model = LanguageModel(network, torch.device("cpu"), arithmetic)
    assert wide_frozen_weights(model) == (["0.weight"] if named else [])
