"""One and three updates against TRL's SFTTrainer on the same tokens and masks; reasons in docs/conformance.md."""

from __future__ import annotations

import json
import random
import socket
import sys

import numpy as np
import pytest
import torch

from tests.conformance.our_run import GivenOrder, run_config, train_ours
from tests.conformance.samples import UPDATES
from tests.tiny_models import random_samples, tiny_language_model
from traceforge.errors import UsageError
from traceforge.oracles.record import compare_traces
from traceforge.oracles.trl import trl_sft
from traceforge.samples.tokens import Sample

pytestmark = pytest.mark.usefixtures("one_thread")

# All parameters: weights whose gradient is rounding noise (1e-9) exist, and Adam divides by the gradient's own size.
# An epsilon above the noise keeps them still; with 1e-8 they would move a whole learning rate in a random direction.
CASES = {"lora": (True, 1e-8), "full": (False, 1e-6)}


def settings(**optimizer):
    return run_config(
        optimizer={"learning_rate": 2e-3, "weight_decay": 0.01, **optimizer},
        schedule={"kind": "linear"},
        training={"tokens_per_row": 64},
        data={"train": "none", "max_tokens": 64},
    )


def compare_with_trl(model, updates, config):
    theirs = trl_sft(model.model, updates, optimizer=config.optimizer, schedule=config.schedule)
    ours = train_ours(
        model, GivenOrder(updates), config, total_updates=len(updates), evaluated=random_samples((9,), seed=5)
    )
    return compare_traces(ours, theirs)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("num_updates", [1, 3])
def test_updates_equal_those_of_sft_trainer(family, case, num_updates):
    adapter, epsilon = CASES[case]
    record = compare_with_trl(
        tiny_language_model(family, adapter=adapter), UPDATES[:num_updates], settings(epsilon=epsilon)
    )
    assert record.status == "passed", (record.failed_checks, record.figures)
    assert record.tolerances["loss_nats"] == 1e-5
    assert record.tolerances["weight_change_relative_l2"] == 1e-3
    assert record.figures["trained_tensors"] == (28 if adapter else {"llama": 21, "qwen3": 25}[family])
    assert len(record.figures["losses"]["theirs"]) == num_updates


def test_clipping_off_a_constant_rate_and_strong_decay_mean_the_same():
    config = settings(max_gradient_norm=None, weight_decay=0.3, betas=(0.8, 0.9), epsilon=1e-6)
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"kind": "constant"})})
    record = compare_with_trl(tiny_language_model("qwen3", adapter=False, attention="plain"), UPDATES, config)
    assert record.status == "passed", (record.failed_checks, record.figures)


def test_the_logged_loss_is_the_token_weighted_loss_of_the_whole_update():
    """The two sides must not agree on something else: the plain-torch loss of the first update is a third witness."""
    from tests.tiny_models import reference_loss

    model = tiny_language_model("llama")
    model.base.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = float(reference_loss(model.model, UPDATES[0]))
        means = [float(reference_loss(model.model, [sample])) for sample in UPDATES[0]]
    theirs = trl_sft(model.model, UPDATES[:1], optimizer=settings().optimizer, schedule=run_config().schedule)
    assert theirs.losses[0] == pytest.approx(wanted, abs=1e-5)
    assert abs(sum(means) / len(means) - wanted) > 1e-3, "lengths must differ, or a mean of means would pass too"


def test_the_oracle_leaves_network_random_generators_and_terminal_alone(capsys, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda *a, **k: pytest.fail("usage report sent"))
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("network used"))
    model = tiny_language_model("llama")
    weights = {name: value.clone() for name, value in model.model.state_dict().items()}
    attention, modes = model.base.config._attn_implementation, [each.training for each in model.model.modules()]
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    capsys.readouterr()
    trl_sft(model.model, UPDATES[:1], optimizer=settings().optimizer, schedule=settings().schedule)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert all(torch.equal(weights[name], value) for name, value in model.model.state_dict().items())
    assert [each.training for each in model.model.modules()] == modes
    assert model.base.config._attn_implementation == attention
    assert "forward" not in vars(model.base)
    assert capsys.readouterr().out == ""


def test_a_network_that_recomputes_layers_is_compared_by_its_own_weights():
    from traceforge.memory.recompute import recompute_layers

    model = tiny_language_model("llama")
    recompute_layers(model.base.base_model.layers)
    record = compare_with_trl(model, UPDATES, settings())
    assert record.status == "passed", (record.failed_checks, record.figures)


def test_the_record_is_plain_json_with_the_fields_of_the_contract():
    model = tiny_language_model("llama")
    record = json.loads(json.dumps(compare_with_trl(model, UPDATES[:1], settings()).as_dict()))
    assert record.keys() == {
        "status", "check_kind", "versions", "framework_paths", "checks", "figures", "tolerances",
    }  # fmt: skip
    assert record["check_kind"] == "framework_conformance"
    assert record["framework_paths"] == {
        "traceforge": "traceforge.training.loop.train",
        "trl": "trl.SFTTrainer.train",
    }
    assert record["versions"].keys() >= {"traceforge", "trl", "transformers", "accelerate", "peft", "torch"}
    assert all(record["checks"].values())


@pytest.mark.parametrize("library", ["trl", "datasets"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=library) as caught:
        trl_sft(torch.nn.Linear(1, 1), UPDATES, optimizer=settings().optimizer, schedule=settings().schedule)
    assert "pip install 'traceforge-train[oracle]'" in caught.value.hint


def test_what_labels_cannot_say_is_refused_by_name():
    weighted = random_samples((9,), weighted=True, seed=3)
    untrained = [Sample("u#0", "u", "u", np.arange(4), np.zeros(4))]
    network, config = tiny_language_model("llama").model, settings()
    for samples, message in ((weighted, "token weight"), (untrained, "no trained token"), ([], "at least one sample")):
        with pytest.raises(UsageError, match=message):
            trl_sft(network, [samples], optimizer=config.optimizer, schedule=config.schedule)
    warm = config.schedule.model_copy(update={"warmup_updates": 2})
    with pytest.raises(UsageError, match="warmup_updates"):
        trl_sft(network, UPDATES, optimizer=config.optimizer, schedule=warm)
    with pytest.raises(UsageError, match="adamw_8bit"):
        trl_sft(network, UPDATES, optimizer=settings(name="adamw_8bit").optimizer, schedule=config.schedule)


def test_dropout_and_narrow_weights_are_refused_by_name():
    config = settings()
    with pytest.raises(UsageError, match=r"dropout 0\.1"):
        trl_sft(
            tiny_language_model("llama", dropout=0.1, attention="packed").model,
            UPDATES,
            optimizer=config.optimizer,
            schedule=config.schedule,
        )
    with pytest.raises(UsageError, match="bfloat16"):
        trl_sft(
            tiny_language_model("llama").model.to(torch.bfloat16),
            UPDATES,
            optimizer=config.optimizer,
            schedule=config.schedule,
        )
