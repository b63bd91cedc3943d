"""The GPU tier: the same update on a CUDA device as in float32 on the CPU. Without a device these tests fail.

Tolerances against the float32 reference: in float32 (no TF32) 1e-4 for loss and gradients, which covers the order of
summation; in bfloat16 3e-3 for the loss and 6e-2 relative L2 over all gradients, which covers 8 bits of mantissa
through two layers (bfloat16 on a CPU: 3e-4 and 3e-2). A token that sees one wrong neighbour moves the loss by 1e-1.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.tiny_models import gradients, random_samples, reference_gradients, tiny_language_model

from traceforge.models.language_model import LanguageModel, choose_layout
from traceforge.samples.tokens import Sample
from traceforge.training.update import backward, plan_update

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (3e-3, 6e-2)}


@pytest.fixture(autouse=True)
def _a_device_is_there():
    if not torch.cuda.is_available():
        pytest.fail("the GPU tier needs a CUDA device, and torch finds none")
    torch.backends.cuda.matmul.allow_tf32 = False


def on_gpu(model: LanguageModel, dtype: torch.dtype, attention: str) -> LanguageModel:
    """Return the model on the device: frozen weights in `dtype`, trained ones in float32, as a run holds them."""
    network = model.model.to("cuda")
    for parameter in network.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    moved = LanguageModel(network, torch.device("cuda"), dtype, logits_chunk_tokens=64)
    choose_layout(moved, attention)
    return moved


def forked_samples(turns: int) -> list[Sample]:
    """Return samples of one history that each end in their own way: `turns` - 1 forks."""
    generator = np.random.default_rng(3)
    history = generator.integers(0, 211, 40 * turns)
    samples = []
    for turn in range(turns):
        ids = np.concatenate([history[: 40 * (turn + 1)], generator.integers(0, 211, 12)])
        weights = np.zeros(len(ids))
        weights[-12:] = 1.0
        samples.append(Sample(f"turn#{turn}", "history", "task", ids, weights))
    return samples


SETS = {
    "samples side by side": random_samples((230, 50, 170, 90), weighted=True),
    "a tree of three turns": forked_samples(3),
    "a tree with many forks": forked_samples(12),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["tree", "packed", "plain"])
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_update_on_the_gpu_is_the_float32_update_of_plain_samples(family, name, attention, dtype):
    samples = SETS[name]
    model = tiny_language_model(family, attention="plain")
    wanted_loss, wanted = reference_gradients(model, samples)
    moved = on_gpu(model, dtype, attention)
    loss = backward(moved, plan_update(moved, samples, tokens_per_row=2048))
    found = {key: value.cpu() for key, value in gradients(moved.model).items()}
    loss_limit, gradient_limit = TOLERANCES[dtype]
    assert abs(loss - wanted_loss) <= loss_limit * wanted_loss
    flat_found = torch.cat([found[key].double().flatten() for key in sorted(wanted)])
    flat_wanted = torch.cat([wanted[key].double().flatten() for key in sorted(wanted)])
    assert float((flat_found - flat_wanted).norm() / flat_wanted.norm()) <= gradient_limit
