"""The lean path gives the loss and every gradient of the samples run one by one through transformers' own layers.

Tolerances: float64 1e-10. Float32: loss 1e-6 relative, 3e-6 relative L2 over all gradients together and 1e-5 for each
alone: the reference's own rounding is 1e-6. Every planted bug below moves them by orders of
magnitude.
"""

from __future__ import annotations

import pytest
import torch
from tests.equivalence import test_pairs_against_plain_branches as pair_tests
from tests.equivalence.test_trees_against_plain_samples import CASES
from tests.tiny_models import gradients, random_samples, reference_gradients, tiny_language_model

from traceforge import lean_sizes
from traceforge.memory import layer_maths
from traceforge.memory.folded_linear import AdapterGradients
from traceforge.memory.offload import ActivationStore
from traceforge.models import layer_parts, layers, rectangles
from traceforge.models.lean import LeanNetwork, LeanOptions
from traceforge.oracles.record import relative_l2
from traceforge.training.methods import Simpo
from traceforge.training.update import backward, plan_update

FAMILIES = ("llama", "qwen3", "qwen2", "mistral")
MODES = {
    "resident": {},
    "streamed": {"placement": "streamed"},
    "attention recomputed": {"recompute_attention": True},
    "streamed and recomputed": {"placement": "streamed", "recompute_attention": True},
}


def lean_model(family: str = "qwen3", *, tile_tokens: int = 16, mode: dict | None = None, **changes):
    """Return a tiny model on the lean path, and the same model before that."""
    plain = tiny_language_model(family, **changes)
    model = tiny_language_model(family, **changes)
    options = LeanOptions(tile_tokens=tile_tokens, **(mode or {}))
    model.lean = LeanNetwork(model.model, model.device, model.dtype, options)
    return model, plain


def both(model, plain, samples, *, tokens_per_row=1000):
    """Return loss and gradients of an update on the lean path, and of the plain reference."""
    reference = "sdpa" if plain.dtype == torch.float64 else "eager"
    wanted = reference_gradients(plain, samples, attention=reference)
    model.model.zero_grad(set_to_none=True)
    loss = backward(model, plan_update(model, samples, tokens_per_row=tokens_per_row))
    found = gradients(model.model)
    model.model.zero_grad(set_to_none=True)
    return (loss, found), wanted


def differences(found, wanted) -> tuple[float, float, float]:
    """Return the relative difference of the loss, of all gradients together, and of the worst one."""
    (loss, grads), (wanted_loss, wanted_grads) = found, wanted
    assert grads.keys() == wanted_grads.keys()
    assert all(each.norm() > 0 for each in wanted_grads.values()), "a gradient of zero would prove nothing"
    together = relative_l2(
        *(torch.cat([each[name].flatten() for name in wanted_grads]) for each in (grads, wanted_grads))
    )
    worst = max(relative_l2(grads[name], wanted_grads[name]) for name in wanted_grads)
    return abs(loss - wanted_loss) / abs(wanted_loss), together, worst


def assert_equal(found, wanted, dtype=torch.float32):
    limits = (1e-6, 3e-6, 1e-5) if dtype == torch.float32 else (1e-10, 1e-10, 1e-10)
    measured = differences(found, wanted)
    assert all(one <= limit for one, limit in zip(measured, limits, strict=True)), measured


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_every_family_and_mode_gives_the_update_of_plain_samples(family, mode):
    model, plain = lean_model(family, mode=MODES[mode])
    assert_equal(*both(model, plain, CASES["several levels"]))


@pytest.mark.parametrize("case", [name for name in CASES if name != "fork at token 0"])
def test_every_tree_gives_the_update_of_plain_samples(case):
    model, plain = lean_model()
    assert_equal(*both(model, plain, CASES[case]))


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_both_agree_to_rounding(family):
    model, plain = lean_model(family, dtype=torch.float64)
    assert_equal(*both(model, plain, CASES["a forest"]), torch.float64)


@pytest.mark.parametrize("tile_tokens", [1, 7, 64, 4096])
def test_no_size_of_tile_changes_the_update(tile_tokens):
    model, plain = lean_model("llama", tile_tokens=tile_tokens)
    assert_equal(*both(model, plain, random_samples((23, 5, 40, 31), weighted=True)))


def test_accumulated_rows_give_the_update_of_plain_samples():
    model, plain = lean_model("qwen2")
    assert_equal(*both(model, plain, random_samples((23, 5, 17, 40, 2, 31, 9, 12), weighted=True), tokens_per_row=41))


@pytest.mark.parametrize(("key_heads", "passes"), [(2, 2), (4, 4)])
@pytest.mark.parametrize("recompute_attention", [False, True])
def test_heads_taken_in_several_passes_give_the_same(monkeypatch, key_heads, passes, recompute_attention):
    """A layer's input is then let go of in between and comes a second time."""
    monkeypatch.setattr(lean_sizes, "FULL_PASS", 1)
    brought = []
    real = ActivationStore.bring_again
    monkeypatch.setattr(ActivationStore, "bring_again", lambda *a: brought.append(a[1]) or real(*a))
    mode = {"recompute_attention": recompute_attention}
    model, plain = lean_model(mode=mode, num_attention_heads=8, num_key_value_heads=key_heads)
    assert_equal(*both(model, plain, CASES["several levels"]))
    angles = (torch.zeros(9, 16),) * 2
    assert len(layer_parts.plan_row(model.lean.shape, (), angles, tile_tokens=4, recompute=False).passes) == passes
    assert brought == [1, 0]


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": True}, {"num_attention_heads": 2}, {"rope_parameters": YARN}],
    ids=["tied", "ungrouped", "yarn"],
)
def test_tied_embeddings_ungrouped_heads_and_yarn_are_right(changes):
    model, plain = lean_model("llama", **changes)
    assert_equal(*both(model, plain, CASES["turns of one trajectory"]))


def test_biases_of_every_linear_are_right():
    model, plain = lean_model("llama", attention_bias=True, mlp_bias=True)
    for each in (model, plain):
        generator = torch.Generator().manual_seed(5)
        for name, parameter in each.model.named_parameters():
            if name.endswith("bias"):
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.lean = LeanNetwork(model.model, model.device, model.dtype, LeanOptions(tile_tokens=16))
    assert_equal(*both(model, plain, CASES["several levels"]))


def test_a_second_update_after_an_evaluation_is_right():
    model, plain = lean_model()
    (row,) = model.rows(CASES["a forest"], tokens_per_row=1000)
    with torch.no_grad():
        model.row_logprobs(row)
    assert_equal(*both(model, plain, CASES["several levels"]))
    with torch.no_grad():
        model.row_logprobs(row)
    assert_equal(*both(model, plain, CASES["several levels"]))


@pytest.mark.parametrize("pairs", pair_tests.CASES.values(), ids=pair_tests.CASES.keys())
def test_simpo_on_the_lean_path_is_simpo_on_plain_branches(pairs):
    model = tiny_language_model("qwen3", dtype=torch.float64)
    model.lean = LeanNetwork(model.model, model.device, model.dtype, LeanOptions(tile_tokens=16))
    limits = {"loss_tolerance": 1e-10, "gradient_tolerance": 1e-10}
    pair_tests.assert_same(model, pairs, Simpo(pair_tests.SETTINGS), pair_tests.simpo_formula, **limits)


def test_nothing_is_read_of_what_the_slab_held_before():
    model, plain = lean_model()
    both(model, plain, CASES["a forest"])
    model.lean.activations_slab.bytes().fill_(0xFF)  # NaN in every dtype
    assert_equal(*both(model, plain, CASES["several levels"]))


def without_mean(grad, x, eps):
    return grad * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def turned_back(real):
    return lambda grad, x, cos, sin, weight, eps: real(grad, x, cos, -sin, weight, eps)


PLANTED = {
    "a gradient that is not added to what stands there": (
        layers,
        "rms_norm_backward_",
        lambda real: lambda *given, adds: real(*given, adds=False),
    ),
    "RoPE turned the wrong way in backward": (layers, "rotary_backward_", turned_back),
    "another gate in backward": (
        layers,
        "swiglu_backward_",
        lambda real: lambda gates, grad: real(gates.mul_(0.9), grad),
    ),
    "forks merged without their log-sum-exp": (
        rectangles,
        "_merge",
        lambda real: lambda output, logsumexp, part, part_lse: output.add_(part).mul_(0.5),
    ),
    "a norm's derivative without its mean": (layer_maths, "_unit_backward", lambda real: without_mean),
    "an adapter's gradient without its scaling": (
        AdapterGradients,
        "by_parameter",
        lambda real: lambda sums: [None if each is None else each / 2 for each in real(sums)],
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_seen(monkeypatch, bug):
    module, name, change = PLANTED[bug]
    model, plain = lean_model()
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    found, wanted = both(model, plain, CASES["several levels"])
    assert max(differences(found, wanted)) > 1e-3
