"""Admission, self-tests and refusals of the model layer."""

from __future__ import annotations

import pytest
import torch
from tests.tiny_models import random_samples, tiny_language_model, tiny_network

from traceforge.errors import DisagreementError
from traceforge.memory.recompute import recompute_layers
from traceforge.models import attention
from traceforge.models.language_model import LanguageModel, check_head, choose_layout
from traceforge.training.update import backward, plan_update


def plain_model(network):
    return LanguageModel(network, torch.device("cpu"), torch.float32)


def test_a_sliding_window_runs_plain_and_says_why():
    model = plain_model(tiny_network("mistral", sliding_window=8))
    choose_layout(model, "auto")
    assert model.layout == "plain"
    assert "sliding-window" in model.layout_reason
    with pytest.raises(
        DisagreementError, match=r"model\.attention = 'tree' cannot be honoured, not tree: sliding-window"
    ):
        choose_layout(model, "tree")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_longest_position_runs_plain(kind):
    config = tiny_network("llama").config
    config.rope_parameters = {"rope_type": kind}
    assert kind in attention.why_not_rows(config)


def test_a_model_that_leaks_between_samples_is_not_admitted(monkeypatch):
    """The start-up self-test is what notices: here attention runs over the whole row."""
    real = attention.tree_attention

    def leaking(module, query, key, value, mask, **keywords):
        from traceforge.models.kernels import CpuFlash, Task
        from traceforge.samples.rows import Piece

        length = query.shape[2]
        keywords[attention.LAYOUT_KEYWORD] = attention.RowLayout(
            (Task(Piece(0, length, 0, length, causal=True), CpuFlash()),)
        )
        return real(module, query, key, value, mask, **keywords)

    monkeypatch.setattr(attention, "tree_attention", leaking)
    model = plain_model(tiny_network("llama"))
    choose_layout(model, "auto")
    assert model.layout == "plain"
    assert "self-test" in model.layout_reason
    monkeypatch.undo()
    attention.register()


def test_a_head_that_does_something_unknown_is_refused():
    network = tiny_network("llama")
    check_head(plain_model(network))
    real = network.lm_head.forward
    network.lm_head.forward = lambda hidden: real(hidden) * 1.5
    with pytest.raises(DisagreementError, match="output layer"):
        check_head(plain_model(network))


def test_a_soft_cap_and_a_logit_scale_are_honoured():
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    torch.manual_seed(0)
    gemma = AutoConfig.for_model("gemma2", **common, head_dim=16, final_logit_softcapping=2.0)
    granite = AutoConfig.for_model("granite", **common, logits_scaling=4.0)
    for config in (gemma, granite):
        network = AutoModelForCausalLM.from_config(config).eval()
        network.get_output_embeddings().weight.data.normal_(0, 1.0)
        assert check_head(plain_model(network)) < 1e-4


def test_an_evaluation_in_between_does_not_switch_recompute_off():
    model = tiny_language_model("llama")
    calls = {"forward": 0}
    for layer in model.base.base_model.layers:
        real = layer.forward

        def counted(*args, _real=real, **kwargs):
            calls["forward"] += 1
            return _real(*args, **kwargs)

        layer.forward = counted
    recompute_layers(model.base.base_model.layers)
    update = plan_update(model, random_samples([9]), tokens_per_row=9)

    def forwards_of_one_update():
        calls["forward"] = 0
        backward(model, update)
        return calls["forward"]

    first = forwards_of_one_update()
    model.model.eval()
    with torch.no_grad():
        model.row_logprobs(update.rows[0])
    assert first == forwards_of_one_update() == 2 * len(model.base.base_model.layers)


def test_full_logits_are_never_made():
    """The head's own forward is not called: log-probabilities come from chunks of trained positions."""
    model = tiny_language_model("llama")
    model.base.lm_head.forward = None
    backward(model, plan_update(model, random_samples([30], trained_share=0.1), tokens_per_row=30))
