"""SmolLM2-135M-Instruct with its real weights: turns of real runs as trees give the update of the samples one by one.

Weights of a trained model are not those of a random one: its norms span decades and a few channels dominate, so a wrong
neighbour or a lost digit shows here where a random model might hide it.

Samples  `chat`: the first two turns of a mini-swe-agent log by the model's own template, which keeps everything, so the
         second continues the first; with them ten short conversations that share the template's system prompt.
         `transcript`: the first three turns of the log; every one forks from the history.
Model    float32, as `traceforge.demo.model` prepares it, with random LoRA B on all seven linears of its 30 layers.
Against  Each sample alone through the model's own SDPA attention, log_softmax over the whole vocabulary in float64.
Within   1e-6 of the loss, 1e-4 relative L2 of every adapter gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.real_trajectories import load_turns, plain_loss
from tests.tiny_models import gradients, randomize_adapter

from traceforge.config import AdapterSettings
from traceforge.demo.model import prepare_model
from traceforge.models.adapters import add_adapter
from traceforge.models.language_model import LanguageModel, choose_layout
from traceforge.oracles.record import relative_l2
from traceforge.samples.tokenizer import load_tokenizer
from traceforge.samples.tokens import Sample
from traceforge.training.update import backward, plan_update

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
LOG = "mini-swe-agent-v1/github_issue.traj.json"
CONVERSATIONS = "openai-messages/conversations.jsonl"
LOSS_RELATIVE = 1e-6
GRADIENT_RELATIVE_L2 = 1e-4


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_model(ROOT / ".cache/models/SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def tokenizer(folder) -> Any:
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def model(folder) -> LanguageModel:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    network = add_adapter(network.requires_grad_(False), AdapterSettings(rank=4, alpha=4), seed=3)
    randomize_adapter(network, scale=0.02)
    model = LanguageModel(network.train(), torch.device("cpu"), torch.float32)
    choose_layout(model, "tree")
    return model


def assert_same_update(model: LanguageModel, samples: tuple[Sample, ...], *, forks: int, saved: float) -> None:
    """Compare one tree of all samples with the samples one by one."""
    update = plan_update(model, samples, tokens_per_row=5000)
    (row,) = update.rows
    assert row.num_forks == forks
    assert row.num_tokens < (1 - saved) * sum(sample.num_tokens for sample in samples)
    loss = backward(model, update)
    found = gradients(model.model)
    model.model.zero_grad(set_to_none=True)

    name = model.base.config._attn_implementation
    model.base.set_attn_implementation("sdpa")
    total = sum(sample.total_weight for sample in samples)
    wanted_loss = 0.0
    for sample in samples:  # one graph at a time
        part = plain_loss(model.model, [sample], dense_mask=False) * (sample.total_weight / total)
        part.backward()
        wanted_loss += float(part.detach())
    model.base.set_attn_implementation(name)
    wanted = gradients(model.model)
    model.model.zero_grad(set_to_none=True)

    assert abs(loss - wanted_loss) <= LOSS_RELATIVE * wanted_loss
    assert found.keys() == wanted.keys()
    assert len(found) == 30 * 7 * 2
    assert all(each.norm() > 0 for each in wanted.values())
    differences = {name: relative_l2(found[name], each) for name, each in wanted.items()}
    worst = max(differences, key=differences.__getitem__)
    assert differences[worst] <= GRADIENT_RELATIVE_L2, (worst, differences[worst])


def test_chat_turns_and_conversations_as_one_forest_give_the_update_of_the_samples(model, tokenizer, tmp_path):
    turns = load_turns(LOG, tokenizer, tmp_path / "log", max_tokens=1100, observation_limit_tokens=32)
    short = load_turns(CONVERSATIONS, tokenizer, tmp_path / "short", max_tokens=1100)
    assert ([len(turns), len(short)], turns[0].num_tokens) == ([2, 10], 935)
    assert_same_update(model, (*turns, *short), forks=10, saved=0.4)


def test_transcript_turns_as_one_tree_give_the_update_of_the_samples(model, tokenizer, tmp_path):
    turns = load_turns(
        LOG, tokenizer, tmp_path / "log", rendering="transcript", max_tokens=1200, observation_limit_tokens=32
    )
    assert [turn.num_tokens for turn in turns] == [969, 1065, 1163]
    assert_same_update(model, turns, forks=2, saved=0.5)
