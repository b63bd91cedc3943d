"""What stands between a layer's matmuls, against torch's autograd; NF4 against bitsandbytes; the slab's arithmetic."""

from __future__ import annotations

import pytest
import torch

from traceforge.errors import HostMemoryError
from traceforge.memory.folded_linear import AdaptedLinear, AdapterGradients, FoldedLinear
from traceforge.memory.host_table import HostTable
from traceforge.memory.layer_maths import (
    logprobs_,
    rms_norm,
    rms_norm_backward_,
    rotary,
    rotary_backward_,
    swiglu,
    swiglu_backward_,
)
from traceforge.memory.normed_logprobs import normed_logprobs
from traceforge.memory.offload import ActivationStore, Lanes, Saved, tiles_of
from traceforge.memory.pinned import Slab
from traceforge.memory.token_logprobs import Head, token_logprobs
from traceforge.memory.weights import DenseWeight, LayerWeights, Nf4Weight

CPU = torch.device("cpu")
EPS = 1e-5


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def norm(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def same(one, other):
    return torch.allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("adds", [False, True])
def test_the_norm_and_its_gradient_are_autograds(adds):
    x, weight, grad = random(5, 12).requires_grad_(True), random(12, seed=1), random(5, 12, seed=2)
    wanted = norm(x, weight)
    (d_x,) = torch.autograd.grad(wanted, x, grad)
    assert same(rms_norm(x.detach(), weight, EPS, torch.empty(5, 12, dtype=x.dtype)), wanted)
    into = torch.ones(5, 12, dtype=x.dtype)
    rms_norm_backward_(grad, x.detach(), weight, EPS, into, adds=adds)
    assert same(into, d_x + 1 if adds else d_x)


@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_with_and_without_a_norm_and_its_gradient_are_autograds(has_norm):
    x, grad = random(5, 3, 8).requires_grad_(True), random(5, 3, 8, seed=2)
    weight = random(8, seed=1) if has_norm else None
    angles = random(5, 4, seed=3).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    before = norm(x, weight) if has_norm else x
    turned = torch.cat([-before[..., 4:], before[..., :4]], dim=-1)
    wanted = before * cos[:, None] + turned * sin[:, None]
    (d_x,) = torch.autograd.grad(wanted, x, grad)
    assert same(rotary(x.detach(), cos, sin, weight, EPS, torch.empty_like(grad)), wanted)
    into = x.detach().clone()
    rotary_backward_(grad, into, cos, sin, weight, EPS)
    assert same(into, d_x)


def test_swiglu_and_its_gradient_are_autograds():
    gates, grad = random(5, 14).requires_grad_(True), random(5, 7, seed=1)
    wanted = torch.nn.functional.silu(gates[:, :7]) * gates[:, 7:]
    (d_gates,) = torch.autograd.grad(wanted, gates, grad)
    assert same(swiglu(gates.detach(), torch.empty(5, 7, dtype=gates.dtype)), wanted)
    into, value = gates.detach().clone(), grad.clone()
    swiglu_backward_(into, value)
    assert same(into, d_gates)
    assert same(value, wanted)


def test_log_probabilities_and_their_derivative_are_autograds():
    logits, targets = random(4, 9).requires_grad_(True), torch.tensor([0, 8, 3, 3])
    wanted = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (derivative,) = torch.autograd.grad(wanted.sum(), logits)
    into = logits.detach().clone()
    assert same(logprobs_(into, targets), wanted)
    assert same(into, derivative)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 2.0)])
def test_normed_log_probabilities_are_those_of_the_plain_head(scale, softcap):
    hidden, weight, table = random(6, 8).requires_grad_(True), random(8, seed=1), random(11, 8, seed=2)
    head = Head(table, random(11, seed=3), scale, softcap, torch.float64)
    positions, targets, grad = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 0, 10, 3]), random(4, seed=4)
    wanted = token_logprobs(norm(hidden, weight)[positions], targets, head, chunk_tokens=3)
    (d_hidden,) = torch.autograd.grad(wanted, hidden, grad)
    found = normed_logprobs(hidden, positions, targets, head, (weight, EPS), chunk_tokens=3)
    assert same(found, wanted)
    assert same(torch.autograd.grad(found, hidden, grad)[0], d_hidden)


@pytest.mark.parametrize("nested", [True, False])
def test_nf4_is_written_out_as_bitsandbytes_does(nested):
    import bitsandbytes.functional as bnb

    packed, state = bnb.quantize_4bit(torch.randn(192, 128), blocksize=64, compress_statistics=nested, quant_type="nf4")
    weight = Nf4Weight(packed, state)
    found = torch.zeros(192, 130)
    weight.write(weight.parts, found[:, :128])
    assert torch.equal(found[:, :128], bnb.dequantize_4bit(packed, state))
    assert not found[:, 128:].any()


def test_linears_folded_with_adapters_give_autograds_output_and_gradients():
    """Three linears on one input: adapters of different ranks on the first and last, none on the second."""
    x, grad = random(7, 6).requires_grad_(True), random(7, 12, seed=1)
    weights = [random(size, 6, seed=2 + size) for size in (5, 4, 3)]
    bias = random(4, seed=9)
    adapters = [
        (torch.nn.Parameter(random(rank, 6, seed=20 + rank)), torch.nn.Parameter(random(size, rank, seed=30)), scaling)
        for rank, size, scaling in ((2, 5, 0.5), (3, 3, 2.0))
    ]
    outputs = [x @ weights[0].T + adapters[0][2] * x @ adapters[0][0].T @ adapters[0][1].T]
    outputs.append(x @ weights[1].T + bias)
    outputs.append(x @ weights[2].T + adapters[1][2] * x @ adapters[1][0].T @ adapters[1][1].T)
    parameters = [each for adapter in adapters for each in adapter[:2]]
    wanted = torch.cat(outputs, dim=1)
    d_x, *d_parameters = torch.autograd.grad(wanted, [x, *parameters], grad)

    linears = [
        AdaptedLinear(DenseWeight(weights[0]), None, adapters[0]),
        AdaptedLinear(DenseWeight(weights[1]), bias),
        AdaptedLinear(DenseWeight(weights[2]), None, adapters[1]),
    ]
    folded = FoldedLinear(linears, torch.float64, rank_multiple=4)
    assert folded.padded_rank == 8
    assert folded.parameters() == parameters
    matrix = folded.matrix([linear.weight.parts for linear in linears], CPU)
    inputs, grads = folded.input_buffer(7, CPU), folded.gradient_buffer(7, CPU)
    inputs[:, :6], grads[:, :12] = x.detach(), grad
    assert same(folded.forward(inputs, matrix, torch.empty(7, 12, dtype=x.dtype)), wanted)
    folded.fold_gradient(grads, matrix)
    assert same(folded.input_gradient(grads, matrix, torch.empty(7, 6, dtype=x.dtype)), d_x)
    sums = AdapterGradients(folded, CPU)
    for tile in tiles_of(7, 3):
        sums.add(grads[tile], inputs[tile])
    for found, one in zip(sums.by_parameter(), d_parameters, strict=True):
        assert same(found, one)


def test_what_layers_save_comes_back_bit_for_bit_from_one_slab():
    store = ActivationStore(Lanes(CPU), Slab(CPU, "activations"))
    plan = {"x": Saved((10, 3), torch.bfloat16, by_tile=True), "l": Saved((2, 10), torch.float32, by_tile=False)}
    generation = store.begin(3, plan, tiles_of(10, 4))
    saved = [{"x": torch.randn(10, 3).bfloat16(), "l": torch.randn(2, 10)} for _ in range(3)]
    for layer, tensors in enumerate(saved):
        for name, tensor in tensors.items():
            store.save(layer, name, tensor)
    for layer in (2, 1, 0):
        store.prefetch(layer - 1)
        for name, arrival in store.take(layer).items():
            assert torch.equal(arrival.wait(), saved[layer][name])
        assert torch.equal(store.bring_again(layer, "x").wait(2), saved[layer]["x"])
    assert store.begin(1, plan, tiles_of(10, 4)) == generation + 1


def test_streamed_weights_are_the_resident_ones_and_at_most_two_layers_are_there():
    layers = [[DenseWeight(torch.randn(5, 7)), DenseWeight(torch.randn(3, 5).bfloat16())] for _ in range(4)]
    wanted = [[weight.parts[0].clone() for weight in layer] for layer in layers]
    weights = LayerWeights(layers, Lanes(CPU), Slab(CPU, "weights"))
    assert all(weight.parts[0].numel() == 0 for layer in layers for weight in layer)
    for number in range(4):
        weights.prefetch(number + 1)
        found = weights.use(number)
        assert all(torch.equal(one[0], other) for one, other in zip(found, wanted[number], strict=True))
        assert len(weights._blocks) <= 2
        weights.release(number)


def test_a_slab_refuses_what_is_over_its_budget_and_grows_within():
    slab = Slab(CPU, "trials", budget_bytes=3 * 4096)
    slab.reserve(5000)
    assert slab.num_bytes == 2 * 4096
    slab.reserve(100)
    assert slab.num_bytes == 2 * 4096
    with pytest.raises(HostMemoryError, match="trials"):
        slab.reserve(4 * 4096)
    slab.reserve(3 * 4096)
    assert slab.view(4096, (2, 8), torch.float64).data_ptr() % 4096 == 0


@pytest.mark.parametrize("to_host", [False, True])
def test_a_table_on_the_host_gives_the_rows_and_the_whole_of_the_one_on_the_device(to_host):
    values = torch.randn(11, 5).bfloat16()
    table = HostTable(values, CPU, to_host=to_host, purpose="trials")
    ids = torch.tensor([10, 0, 0, 3])
    assert torch.equal(table.rows(ids), values[ids])
    assert torch.equal(table.whole(), values)
    table.prefetch(Lanes(CPU))
    assert torch.equal(table.whole(), values)
    assert table.host_bytes == (4096 if to_host else 0)
