"""`data.group` decides which samples an update holds, never what an update of the same samples does.

With "trajectory" an update takes whole trajectories, with "none" single turns in another order. Two updates that hold
the same samples are the same update: same rows, same loss, same gradient. In float32 bit by bit, because samples are
sorted before they are laid out.
"""

from __future__ import annotations

import pytest
import torch
from tests.real_trajectories import TRAJECTORIES, plain_loss, renumbered
from tests.tiny_models import gradients, tiny_language_model

from traceforge.config import DataSettings
from traceforge.oracles.record import relative_l2
from traceforge.samples.build import build_sft
from traceforge.samples.dataset import WeightedSamples, load_samples
from traceforge.samples.tokens import Sample
from traceforge.training.order import UpdateOrder
from traceforge.training.update import backward, plan_update
from traceforge.trajectories.ingest import ingest

pytestmark = pytest.mark.usefixtures("one_thread")

LOGS = ("github_issue.traj.json", "local.traj.json")
GROUPS = ("trajectory", "none")


@pytest.fixture(scope="module")
def by_group(qwen3_tokenizer, tmp_path_factory) -> dict[str, tuple[Sample, ...]]:
    """The same turns of two runs, loaded under either setting; token ids renumbered."""
    folder = tmp_path_factory.mktemp("run")
    ingest([str(TRAJECTORIES / "mini-swe-agent-v1" / log) for log in LOGS], folder / "in")
    build_sft(folder / "in", folder / "sft")
    found = {}
    for group in GROUPS:
        settings = DataSettings(
            train=str(folder / "sft"), group=group, max_tokens=1000, observation_limit_tokens=64, rendering="chat"
        )
        found[group] = renumbered(load_samples(settings, qwen3_tokenizer).train[0].samples)
    return found


def updates(samples: tuple[Sample, ...], samples_per_update: int) -> list[tuple[Sample, ...]]:
    order = UpdateOrder([WeightedSamples("set", 1.0, samples)], items_per_update=samples_per_update, seed=42)
    return order.updates_of_pass(0)


def ids(samples: tuple[Sample, ...]) -> list[str]:
    return [sample.sample_id for sample in samples]


@pytest.fixture(scope="module")
def model():
    return tiny_language_model("qwen3", vocabulary=1000)


def loss_and_gradients(model, samples, tokens_per_row):
    update = plan_update(model, samples, tokens_per_row=tokens_per_row)
    loss = backward(model, update)
    found = gradients(model.model)
    model.model.zero_grad(set_to_none=True)
    return loss, found, update


@pytest.mark.parametrize("tokens_per_row", [1000, 8000])
def test_an_update_of_the_same_samples_has_the_same_gradient_however_they_were_grouped(model, by_group, tokens_per_row):
    samples_per_update = len(by_group["none"])
    (grouped,), (single,) = (updates(by_group[group], samples_per_update) for group in GROUPS)
    assert sorted(ids(grouped)) == sorted(ids(single))
    assert ids(grouped) != ids(single), "drawn in another order, or this would prove nothing"

    loss, found, update = loss_and_gradients(model, grouped, tokens_per_row)
    other_loss, other, other_update = loss_and_gradients(model, single, tokens_per_row)
    assert len(update.rows) == len(other_update.rows) == {1000: 3, 8000: 1}[tokens_per_row]
    assert update.denominator == other_update.denominator
    assert loss == other_loss
    assert found.keys() == other.keys()
    assert all(torch.equal(found[name], other[name]) for name in found)

    plain = tiny_language_model("qwen3", vocabulary=1000, attention="plain")
    wanted_loss = plain_loss(plain.model, single)
    wanted_loss.backward()
    wanted = gradients(plain.model)
    assert abs(loss - float(wanted_loss.detach())) <= 1e-6 * loss
    assert max(relative_l2(found[name], wanted[name]) for name in wanted) <= 1e-4


def test_only_the_trajectory_setting_keeps_the_turns_of_a_run_in_one_update(by_group):
    for update in updates(by_group["trajectory"], 1):
        (run,) = {sample.sample_id.split("#")[0] for sample in update}
        assert len(update) == sum(sample.sample_id.split("#")[0] == run for sample in by_group["trajectory"])
    assert [len(update) for update in updates(by_group["none"], 1)] == [1] * len(by_group["none"])


def test_gradients_of_single_turns_add_up_to_that_of_their_trajectory(model, by_group):
    """Weighted by what each update divides by: nothing of a turn is lost or counted twice in a tree."""
    run = max(updates(by_group["trajectory"], 1), key=len)
    loss, found, update = loss_and_gradients(model, run, 8000)
    assert update.rows[0].num_tokens < 0.6 * sum(sample.num_tokens for sample in run)
    turns = [each for each in updates(by_group["none"], 1) if each[0].sample_id in ids(run)]
    assert len(turns) == len(run) > 1
    parts = [loss_and_gradients(model, turn, 8000) for turn in turns]
    shares = [part.denominator / update.denominator for _, _, part in parts]
    total = sum(part[0] * share for part, share in zip(parts, shares, strict=True))
    assert abs(loss - total) <= 1e-6 * loss
    for name, gradient in found.items():
        summed = sum(part[1][name] * share for part, share in zip(parts, shares, strict=True))
        assert relative_l2(gradient, summed) <= 1e-4
