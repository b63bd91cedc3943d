"""Which path rows take through the layers: chosen, checked on the loaded weights, recorded, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiny_models import random_samples, tiny_language_model

from traceforge.config import MemorySettings
from traceforge.errors import DisagreementError, HostMemoryError, ModelError
from traceforge.memory import layer_maths
from traceforge.models import layers, lean
from traceforge.models.language_model import choose_path
from traceforge.models.lean import LeanNetwork, LeanOptions, why_not_lean
from traceforge.training.update import backward, plan_update


def test_on_a_cpu_auto_stays_with_the_models_own_layers_and_says_why():
    model = tiny_language_model()
    choose_path(model, MemorySettings())
    assert model.lean is None
    assert model.effective_path() == "generic"
    assert "pays on a GPU" in model.path_reason


def test_the_lean_path_is_tested_on_the_weights_and_described():
    model = tiny_language_model("qwen3")
    choose_path(model, MemorySettings(path="lean", placement="streamed", recompute_attention=True, tile_tokens=32))
    assert "self-test" in model.path_reason
    for word in ("lean", "2 x Qwen3DecoderLayer", "float32", "streamed", "recomputed", "32 tokens", "torch kernels"):
        assert word in model.effective_path()
    backward(model, plan_update(model, random_samples([40]), tokens_per_row=40))
    assert "cpu_flash" in model.effective_attention()


@pytest.mark.parametrize("asked", [{"path": "lean"}, {"placement": "streamed"}, {"recompute_attention": True}], ids=str)
def test_what_a_model_does_not_admit_is_an_error_that_names_setting_and_reason(asked):
    with pytest.raises(ModelError, match=r"memory\.path.*dropout"):
        choose_path(tiny_language_model(dropout=0.1, attention="plain"), MemorySettings(**asked))


def test_a_lean_layer_that_disagrees_with_the_models_own_is_refused(monkeypatch):
    real = layer_maths.swiglu
    monkeypatch.setattr(layers, "swiglu", lambda gates, out: real(gates.mul_(0.5), out))
    with pytest.raises(DisagreementError, match="lean path differs"):
        choose_path(tiny_language_model(), MemorySettings(path="lean"))


def adapter_of(model):
    return model.base.base_model.layers[1].self_attn.q_proj


def with_a_trained_norm(model):
    model.base.base_model.norm.weight.requires_grad_(True)


def with_another_linear(model):
    class Other(torch.nn.Linear):
        pass

    adapter_of(model).base_layer.__class__ = Other


def with_a_transposed_weight(model):
    adapter_of(model).fan_in_fan_out = True


def with_a_disabled_adapter(model):
    adapter_of(model).enable_adapters(False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_a_trained_norm, "norm.weight is trained"),
        (with_another_linear, "is a Other, neither"),
        (with_a_transposed_weight, "transposed"),
        (with_a_disabled_adapter, "active, unmerged"),
    ],
)
def test_each_obstacle_is_named(change, said):
    model = tiny_language_model()
    assert why_not_lean(model.model) is None
    change(model)
    assert said in str(why_not_lean(model.model))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"family": "llama", "hidden_act": "gelu"}, "gelu"),
        ({"family": "llama", "head_dim": 12}, "multiple of 8"),
        ({"family": "mistral", "sliding_window": 16}, "sliding-window"),
        ({"family": "gemma", "hidden_act": "silu"}, "gemma has no lean layers"),
        ({"family": "llama", "adapter": False}, "is trained"),
        ({"family": "llama", "dropout": 0.2}, "dropout"),
    ],
    ids=str,
)
def test_models_without_a_lean_path_say_why(changes, said):
    model = tiny_language_model(attention="plain", **changes)
    assert said in str(why_not_lean(model.model))


def test_a_host_budget_that_is_too_small_is_a_named_error_with_a_way_out():
    model = tiny_language_model()
    model.lean = LeanNetwork(model.model, model.device, model.dtype, LeanOptions(pinned_bytes=10_000))
    with pytest.raises(HostMemoryError, match=r"memory\.pinned_gib") as caught:
        backward(model, plan_update(model, random_samples([400]), tokens_per_row=400))
    assert "recompute_attention" in str(caught.value.hint)


def test_a_budget_counts_streamed_weights_too():
    model, options = tiny_language_model(), LeanOptions(placement="streamed", pinned_bytes=10_000)
    with pytest.raises(HostMemoryError, match="streamed weights"):
        LeanNetwork(model.model, model.device, model.dtype, options)


def test_recomputed_attention_needs_about_half_the_host_memory():
    held = []
    for recompute in (False, True):
        model = tiny_language_model(num_key_value_heads=1, head_dim=16, num_attention_heads=3)
        options = LeanOptions(recompute_attention=recompute)
        model.lean = LeanNetwork(model.model, model.device, model.dtype, options)
        backward(model, plan_update(model, random_samples([3000], trained_share=0.01), tokens_per_row=3000))
        held.append(model.lean.host_bytes())
    assert held[1] < 0.52 * held[0]


def test_streamed_weights_have_left_their_modules():
    model = tiny_language_model()
    model.lean = LeanNetwork(model.model, model.device, model.dtype, LeanOptions(placement="streamed"))
    assert all(getattr(module, "base_layer", module).weight.numel() == 0 for _, module in lean._linears(model.base))


def test_a_quantisation_that_leaves_linears_in_16_bits_is_refused_by_name():
    from traceforge.models.load import ModelLocation, _prepare_4bit

    class Linear4bit(torch.nn.Module):  # what bitsandbytes calls its linears
        pass

    network = tiny_language_model(adapter=False).base
    location = ModelLocation("some/model", Path("folder"), None, None, "local_folder")
    for layer in network.base_model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name in [name for name, module in part.named_children() if type(module) is torch.nn.Linear]:
                setattr(part, name, Linear4bit())
    _prepare_4bit(network, location)
    network.base_model.layers[1].mlp.down_proj = torch.nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"1 of 14 linears stayed unquantised.*layers\.1\.mlp\.down_proj"):
        _prepare_4bit(network, location)
