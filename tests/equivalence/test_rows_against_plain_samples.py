"""Any packing and any cut into micro-batches gives the loss and gradients of the samples run one by one.

Tolerances (float32): loss 1e-6 relative, every gradient 1e-4 relative L2. They cover the order of summation only: a
token that sees one wrong neighbour moves the loss by 1e-3 and more on these models. In float64: 1e-10.
"""

from __future__ import annotations

import pytest
import torch
from tests.tiny_models import gradients, random_samples, reference_gradients, tiny_language_model

from traceforge.config import MemorySettings
from traceforge.errors import TrainingError
from traceforge.memory.offload import ActivationStore
from traceforge.memory.recompute import recompute_layers
from traceforge.oracles.record import relative_l2
from traceforge.training.update import backward, plan_update

LENGTHS = (23, 5, 17, 40, 2, 31, 9, 12)
FAMILIES = ("llama", "qwen3", "qwen2", "mistral")


def assert_same_update(
    model, samples, *, tokens_per_row, loss_tolerance=1e-6, gradient_tolerance=1e-4, reference="eager", degenerate=False
):
    """Compare one update's loss and gradients with the plain reference.

    `degenerate`: samples so short that some gradients are zero; each is then measured against the largest one.
    """
    wanted_loss, wanted = reference_gradients(model, samples, attention=reference)
    loss = backward(model, plan_update(model, samples, tokens_per_row=tokens_per_row))
    found = gradients(model.model)
    model.model.zero_grad(set_to_none=True)
    assert abs(loss - wanted_loss) <= loss_tolerance * abs(wanted_loss)
    assert found.keys() == wanted.keys()
    if degenerate:
        largest = max(float(each.norm()) for each in wanted.values())
        worst = max(
            (float((found[name] - wanted[name]).norm().nan_to_num(nan=torch.inf)) / largest, name) for name in wanted
        )
    else:
        assert all(wanted[name].norm() > 0 for name in wanted), "a gradient of zero would prove nothing"
        worst = max((relative_l2(found[name], wanted[name]), name) for name in wanted)
    assert worst[0] <= gradient_tolerance, worst


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens_per_row", [40, 64, 200])
def test_packed_rows_give_the_update_of_plain_samples(family, tokens_per_row):
    model = tiny_language_model(family)
    assert model.layout == "tree"
    assert_same_update(model, random_samples(LENGTHS, weighted=True), tokens_per_row=tokens_per_row)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_path_gives_the_update_of_plain_samples(family):
    model = tiny_language_model(family, attention="plain")
    assert_same_update(model, random_samples(LENGTHS, weighted=True), tokens_per_row=64)


@pytest.mark.parametrize("attention", ["tree", "plain"])
def test_in_float64_rows_and_plain_samples_agree_to_rounding(attention):
    model = tiny_language_model("qwen3", dtype=torch.float64, attention=attention)
    samples = random_samples(LENGTHS, weighted=True)
    assert_same_update(
        model, samples, tokens_per_row=70, loss_tolerance=1e-10, gradient_tolerance=1e-10, reference="sdpa"
    )


@pytest.mark.parametrize("tie", [False, True])
def test_all_parameters_trained_also_through_a_tied_head(tie):
    model = tiny_language_model("llama", adapter=False, tie_word_embeddings=tie)
    assert_same_update(model, random_samples(LENGTHS, weighted=True), tokens_per_row=64)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_the_chunk_of_the_head_does_not_change_the_update(chunk):
    model = tiny_language_model("llama", logits_chunk_tokens=chunk)
    assert_same_update(model, random_samples(LENGTHS), tokens_per_row=64)


@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_layer_inputs_on_the_host_change_nothing_bit_for_bit(adapter, dropout):
    """Dropout masks, a frozen or trained embedding, several rows of different lengths, an evaluation in between."""
    found = []
    for on_host in (False, True):
        model = tiny_language_model("llama", adapter=adapter, dropout=dropout, attention="packed")
        store = model.input_store(MemorySettings(recompute_layers=True, offload_inputs=True)) if on_host else None
        recompute_layers(model.base.base_model.layers, store)
        model.model.train()
        torch.manual_seed(5)
        update = plan_update(model, random_samples(LENGTHS, weighted=True), tokens_per_row=64)
        with torch.no_grad():
            model.row_logprobs(update.rows[0])
        loss = backward(model, update)
        after = torch.rand(1)
        found.append((loss, gradients(model.model), after))
        assert (model.host_pinned_bytes() or 0) > 0 if on_host else model.host_pinned_bytes() is None
    (loss, grads, after), (loss_host, grads_host, after_host) = found
    assert loss == loss_host
    assert grads.keys() == grads_host.keys()
    assert all(torch.equal(grads[name], grads_host[name]) for name in grads)
    assert torch.equal(after, after_host), "the generator's state is as after a run without recompute"


def test_planted_a_layer_input_that_comes_back_wrong_is_seen(monkeypatch):
    real = ActivationStore.save
    monkeypatch.setattr(ActivationStore, "save", lambda store, number, name, x: real(store, 0, name, x))
    found = []
    for on_host in (False, True):
        model = tiny_language_model("llama")
        store = model.input_store(MemorySettings(recompute_layers=True, offload_inputs=True)) if on_host else None
        recompute_layers(model.base.base_model.layers, store)
        backward(model, plan_update(model, random_samples(LENGTHS), tokens_per_row=64))
        found.append(gradients(model.model))
    assert max(relative_l2(found[1][name], found[0][name]) for name in found[0]) > 1e-2


def test_a_second_forward_before_the_backward_is_refused_by_name_when_inputs_are_on_the_host():
    model = tiny_language_model("llama")
    recompute_layers(
        model.base.base_model.layers, model.input_store(MemorySettings(recompute_layers=True, offload_inputs=True))
    )
    (row,) = model.rows(random_samples((9,)), tokens_per_row=9)
    first, _ = model.row_logprobs(row)
    model.row_logprobs(row)
    with pytest.raises(TrainingError, match="another forward pass"):
        first.sum().backward()


def test_recomputed_layers_give_the_same_update():
    model = tiny_language_model("qwen3")
    assert recompute_layers(model.base.base_model.layers) == 2
    model.model.train()
    assert_same_update(model, random_samples(LENGTHS), tokens_per_row=64)
