"""AdamW with its moments on the host is torch's AdamW, bit for bit, also when one goes on from the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from traceforge.config import OptimizerSettings
from traceforge.errors import ConfigError
from traceforge.run_files import parse_run
from traceforge.training import offloaded_adamw
from traceforge.training.optimizer import build_optimizer, num_state_entries, set_learning_rate

SHAPES = ((5, 7), (3,), (40, 2), (1, 1), (6, 6))


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr(offloaded_adamw, "WINDOW_WEIGHTS", 50)


def named_parameters():
    generator = torch.Generator().manual_seed(0)
    return [(str(n), nn.Parameter(torch.randn(shape, generator=generator))) for n, shape in enumerate(SHAPES)]


def optimizer_of(parameters, *, offload):
    settings = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1, offload_state=offload)
    return build_optimizer(parameters, settings)


def updates(parameters, optimizer, count, *, first=0):
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + number)
        set_learning_rate(optimizer, 1e-2 / (1 + number))
        for place, (_, parameter) in enumerate(parameters):
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if (place + number) % 4 == 3 else grad
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def same_weights(one, other):
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


def test_its_updates_are_those_of_adamw_bit_for_bit():
    plain, offloaded = named_parameters(), named_parameters()
    optimizers = optimizer_of(plain, offload=False), optimizer_of(offloaded, offload=True)
    assert isinstance(optimizers[1], offloaded_adamw.OffloadedAdamW)
    assert len(optimizers[1]._windows) == 4
    assert num_state_entries(optimizers[1]) == 0
    updates(plain, optimizers[0], 6)
    updates(offloaded, optimizers[1], 6)
    assert same_weights(plain, offloaded)
    assert not same_weights(plain, named_parameters())
    assert num_state_entries(optimizers[1]) == len(SHAPES)


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_state_goes_on_in_either_kind(before, after):
    whole, parts = named_parameters(), named_parameters()
    updates(whole, optimizer_of(whole, offload=False), 6)
    first = optimizer_of(parts, offload=before)
    updates(parts, first, 3)
    state = copy.deepcopy(first.state_dict())
    second = optimizer_of(parts, offload=after)
    second.load_state_dict(state)
    updates(parts, second, 3, first=3)
    assert same_weights(whole, parts)


def test_planted_moments_that_do_not_come_back_are_seen(monkeypatch):
    monkeypatch.setattr(offloaded_adamw.Lanes, "to_host", lambda lanes, target, source: None)
    plain, offloaded = named_parameters(), named_parameters()
    updates(plain, optimizer_of(plain, offload=False), 3)
    updates(offloaded, optimizer_of(offloaded, offload=True), 3)
    assert not same_weights(plain, offloaded)


def test_it_is_refused_beside_another_optimizer():
    raw = {"model": {"name_or_path": "m"}, "data": {"train": "d"}}
    with pytest.raises(ConfigError, match=r"offload_state.*adamw_8bit"):
        parse_run({**raw, "optimizer": {"name": "adamw_8bit", "offload_state": True}}, source="run.toml")
