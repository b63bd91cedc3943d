"""Real turns of a real agent run: any packing, sharing and cut into micro-batches gives the update of plain samples.

Samples  The first five turns of a mini-swe-agent log, ingested, built and rendered by the Qwen3 template under the real
         Qwen3 tokenizer, observations shortened: 786 to 1,283 tokens. The template writes a turn with an empty think
         block where it is generated and without one once it is history, so every turn forks from those after it.
Models   Tiny random Llama and Qwen3 with the tokenizer's whole vocabulary (151,669) and random LoRA B.
Against  Each sample alone: eager attention under a dense mask, log_softmax over the whole vocabulary.
Within   1e-6 of the loss, 1e-4 relative L2 of every adapter gradient (float32; only the order of summation differs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.fixtures_tokenizers import DATA
from tests.tiny_models import gradients, tiny_language_model
from torch import Tensor, nn

from traceforge.config import DataSettings
from traceforge.models.language_model import LanguageModel, choose_layout
from traceforge.oracles.record import relative_l2
from traceforge.samples.build import build_sft
from traceforge.samples.dataset import load_samples
from traceforge.samples.prefix_tree import common_prefix_length
from traceforge.samples.tokens import Sample
from traceforge.training.evaluation import evaluate
from traceforge.training.update import backward, plan_update
from traceforge.trajectories.ingest import ingest

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 151_669
LOG = DATA / "trajectories" / "mini-swe-agent-v1" / "github_issue.traj.json"
LONGEST_TOKENS = 1300
GRADIENT_RELATIVE_L2 = 1e-4
LOSS_RELATIVE = 1e-6


@pytest.fixture(scope="module")
def samples(qwen3_tokenizer, tmp_path_factory) -> tuple[Sample, ...]:
    folder = tmp_path_factory.mktemp("run")
    ingest([str(LOG)], folder / "in")
    build_sft(folder / "in", folder / "sft")
    settings = DataSettings(train=str(folder / "sft"), max_tokens=LONGEST_TOKENS, observation_limit_tokens=64)
    return load_samples(settings, qwen3_tokenizer).train[0].samples


@dataclass(frozen=True)
class Reference:
    """A model and the update that its plain samples give."""

    model: LanguageModel
    loss: float
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def reference(request, samples) -> Reference:
    model = tiny_language_model(request.param, vocabulary=VOCABULARY, attention="plain", logits_chunk_tokens=50)
    model.base.set_attn_implementation("eager")
    loss = plain_loss(model.model, samples)
    loss.backward()
    found = gradients(model.model)
    model.model.zero_grad(set_to_none=True)
    model.base.set_attn_implementation("sdpa")
    return Reference(model, float(loss.detach()), found)


def plain_loss(network: nn.Module, samples: Sequence[Sample]) -> Tensor:
    """Return the token-weighted loss of the samples, each run alone; logits only where a trained token is predicted."""
    total = torch.zeros(())
    for sample in samples:
        ids_1S = torch.as_tensor(sample.token_ids_S)[None]
        length = ids_1S.shape[1]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        trained_N = torch.as_tensor(sample.weights_S).nonzero()[:, 0]
        logits_NV = network(
            input_ids=ids_1S, attention_mask=mask, use_cache=False, logits_to_keep=trained_N - 1
        ).logits[0]
        logp_N = logits_NV.log_softmax(-1).gather(1, ids_1S[0, trained_N, None])[:, 0]
        total = total - (torch.as_tensor(sample.weights_S)[trained_N].float() * logp_N).sum()
    return total / sum(sample.total_weight for sample in samples)


def test_the_samples_are_what_this_file_says(samples, qwen3_tokenizer):
    assert [sample.num_tokens for sample in samples] == [786, 874, 989, 1112, 1283]
    assert any("observations_shortened" in sample.cuts for sample in samples)
    for sample in samples:
        trained = qwen3_tokenizer.decode(sample.token_ids_S[sample.weights_S > 0])
        assert trained.startswith("<think>\n\n</think>\n\n")
        assert trained.endswith("```<|im_end|>")
    for sample, later in pairwise(samples):
        fork = common_prefix_length(sample.token_ids_S, later.token_ids_S)
        assert fork == np.flatnonzero(sample.weights_S)[0], "the later one has no think block here"


@pytest.mark.parametrize(
    ("layout", "tokens_per_row", "num_rows"),
    [
        ("plain", 1300, 5),
        ("packed", 1300, 5),
        ("packed", 2700, 2),
        ("tree", 1300, 2),
        ("tree", 8000, 1),
    ],
)
def test_every_layout_and_split_gives_the_update_of_plain_samples(reference, samples, layout, tokens_per_row, num_rows):
    model = reference.model
    if model.layout != layout:  # the self-test takes longer than the update
        choose_layout(model, layout)
    update = plan_update(model, samples, tokens_per_row=tokens_per_row)
    loss = backward(model, update)
    found = gradients(model.model)
    model.model.zero_grad(set_to_none=True)

    assert len(update.rows) == num_rows
    row_tokens = sum(row.num_tokens for row in update.rows)
    sample_tokens = sum(sample.num_tokens for sample in samples)
    assert (row_tokens < 0.6 * sample_tokens) == (layout == "tree"), "shared prefixes are computed once, in trees only"
    assert abs(loss - reference.loss) <= LOSS_RELATIVE * reference.loss
    assert found.keys() == reference.gradients.keys()
    assert len(found) == 28
    differences = {name: relative_l2(found[name], wanted) for name, wanted in reference.gradients.items()}
    assert all(wanted.norm() > 0 for wanted in reference.gradients.values())
    assert max(differences.values()) <= GRADIENT_RELATIVE_L2, differences


def test_one_wrong_token_far_back_would_be_noticed(reference, samples):
    """The oracle's sharpness: one context token of one sample, 400 tokens before its turn."""
    ids_S = samples[1].token_ids_S.copy()
    place = int(np.flatnonzero(samples[1].weights_S)[0]) - 400
    ids_S[place] = ids_S[place + 1] if ids_S[place] != ids_S[place + 1] else ids_S[place + 2]
    changed = [samples[0], replace(samples[1], token_ids_S=ids_S), *samples[2:]]
    found = evaluate(reference.model, changed, tokens_per_row=2700)
    assert abs(found.loss - reference.loss) > 10 * LOSS_RELATIVE * reference.loss
