"""The monitor of a run: its own cards and no others, energy per trained token, and runs that nothing can watch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from traceforge.evidence.views import monitor_facts
from traceforge.monitor.readings import Card, MonitorError, Reading
from traceforge.parallel.world import Device
from traceforge.training.watching import Watch, start_watch

CARDS = [Card(index, f"GPU-{index}{index}{index}a-1") for index in range(8)]


class Steady:
    """Every card draws 100 W for each of its number and one more."""

    name = "steady"

    def cards(self):
        return CARDS

    def read(self, cards):
        return [Reading(1024.0, 24576.0, 50.0, 10.0, 100.0 * (card.index + 1), 60.0) for card in cards]

    def close(self):
        pass


def world(*identities: str):
    """Return ranks with these cards; none = the CPU."""
    return SimpleNamespace(devices=tuple(Device("cuda", identity) for identity in identities) or (Device("cpu"),))


def watch(tmp_path, *identities: str) -> Watch:
    source = Steady()
    return start_watch(world(*identities), tmp_path, opener=lambda: (source, source.cards()))


def test_only_the_cards_of_the_run_are_sampled_each_once_however_many_ranks_share_it(tmp_path):
    found = watch(tmp_path, "777a-1", "555a-1", "555a-1").evidence(trained_tokens=10)
    assert [card.gpu_index for card in found.gpus] == [7, 5]
    assert found.source == "steady"
    assert found.reason is None
    assert (found.mean_power_w, found.peak_power_w) == (700.0, 800.0)
    assert found.peak_memory_bytes == 2**30
    assert {line.split(",")[2] for line in (tmp_path / "gpu.csv").read_text().splitlines()[1:]} == {"5", "7"}


def test_energy_per_trained_token_counts_the_updates_and_not_the_loading_before_them(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("threading.Thread.start", lambda self: None)  # sampled by hand
    monkeypatch.setattr("threading.Thread.is_alive", lambda self: False)
    watched = watch(tmp_path, "111a-1")  # 200 W
    watched.sampler._clock = lambda: now[0]
    for stage, second in (("model_loading_and_baseline", 0), ("effective_updates", 30), ("paired_evaluation", 80)):
        now[0] = float(second)
        watched.sampler.sample()
        watched.enter(stage)
    now[0] = 100.0
    watched.sampler.sample()
    found = watched.evidence(trained_tokens=4000)
    assert found.energy_j == pytest.approx(200 * 100)
    assert found.training_energy_j == pytest.approx(200 * 50)
    assert found.energy_per_trained_token_j == pytest.approx(200 * 50 / 4000)


def test_a_card_of_another_host_is_named_and_the_others_are_sampled(tmp_path):
    found = watch(tmp_path, "111a-1", "eeee-1").evidence(trained_tokens=1)
    assert [card.gpu_index for card in found.gpus] == [1]
    assert found.reason == "not on this host, or not told by the driver: eeee-1"


def test_a_run_goes_on_where_no_driver_answers_and_says_that_the_monitor_is_unavailable(tmp_path):
    def none():
        raise MonitorError("nvidia-ml-py is not installed; nvidia-smi is not on the PATH")

    found = start_watch(world("111a-1"), tmp_path, opener=none).evidence(trained_tokens=1)
    assert found.reason == "monitor unavailable: nvidia-ml-py is not installed; nvidia-smi is not on the PATH"
    assert found.energy_j is None
    assert found.host is not None
    assert not (tmp_path / "gpu.csv").exists()


def test_on_the_cpu_no_driver_is_asked_and_the_process_is_sampled(tmp_path):
    def refuse():
        raise AssertionError("a run on the CPU asked for a driver")

    found = start_watch(world(), tmp_path, opener=refuse).evidence(trained_tokens=1)
    assert found.reason == "no GPU was used"
    assert found.host is not None
    assert found.host.peak_process_rss_bytes > 10 * 2**20
    assert [name for name, _ in monitor_facts(found)] == ["this process"]


def test_the_report_tells_each_card_and_leaves_out_what_it_did_not_tell(tmp_path):
    found = watch(tmp_path, "000a-1", "111a-1").evidence(trained_tokens=1)
    silent = found.gpus[0].model_copy(update={"mean_power_w": None, "peak_power_w": None})
    lines = dict(monitor_facts(found.model_copy(update={"gpus": (silent, found.gpus[1])})))
    assert "power" not in lines["GPU 0"]
    assert "power 200 W on average, 200 W at most" in lines["GPU 1"]
    assert lines["read through"] == "steady"
