"""Recorded agent runs as samples, and the plain-torch loss they are measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.fixtures_tokenizers import DATA
from traceforge.config import DataSettings
from traceforge.samples.build import build_sft
from traceforge.samples.dataset import load_samples
from traceforge.samples.tokens import Sample
from traceforge.trajectories.ingest import ingest

TRAJECTORIES = DATA / "trajectories"


def load_turns(log: str, tokenizer: Any, folder: Path, **settings: Any) -> tuple[Sample, ...]:
    """Return the turns of a log below tests/data/trajectories that fit, ingested, built and rendered in `folder`.

    `settings` are those of `[data]`.
    """
    ingest([str(TRAJECTORIES / log)], folder / "in")
    build_sft(folder / "in", folder / "sft")
    return load_samples(DataSettings(train=str(folder / "sft"), **settings), tokenizer).train[0].samples


def renumbered(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return the samples with token ids renumbered to those that occur: the same tree with a small vocabulary."""
    known = np.unique(np.concatenate([sample.token_ids_S for sample in samples]))
    return tuple(replace(each, token_ids_S=np.searchsorted(known, each.token_ids_S)) for each in samples)


def plain_loss(network: nn.Module, samples: Sequence[Sample], *, dense_mask: bool = True) -> Tensor:
    """Return the token-weighted loss of the samples, each run alone; logits only where a trained token is predicted.

    The softmax over the vocabulary is taken in float64: torch's float32 one alone is 5e-6 off the loss of a real model.

    `dense_mask`: attention under an explicit causal mask; without it the model's own causal attention, which needs less
    memory.
    """
    dtype = next(network.parameters()).dtype
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids_1S = torch.as_tensor(sample.token_ids_S)[None]
        length = ids_1S.shape[1]
        mask = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
        trained_N = torch.as_tensor(sample.weights_S).nonzero()[:, 0]
        logits_NV = network(
            input_ids=ids_1S,
            attention_mask=mask if dense_mask else None,
            use_cache=False,
            logits_to_keep=trained_N - 1,
        ).logits[0]
        logp_N = logits_NV.double().log_softmax(-1).gather(1, ids_1S[0, trained_N, None])[:, 0]
        total = total - (torch.as_tensor(sample.weights_S)[trained_N] * logp_N).sum()
    return total / sum(sample.total_weight for sample in samples)
