"""The files a sampler writes, the means it keeps, and the energy, against numbers worked out by hand."""

from __future__ import annotations

import csv
import time

import pytest

from traceforge.monitor.readings import NOTHING, Card, Reading
from traceforge.monitor.sampler import GPU_COLUMNS, HOST_COLUMNS, Sampler
from traceforge.monitor.series import CardSeries, Series

CARDS = (Card(5, "GPU-5"), Card(7, "GPU-7"))


class Scripted:
    """A source that gives what it was told to give, sample by sample."""

    name = "scripted"

    def __init__(self, *samples: list[Reading]) -> None:
        self.samples, self.closed = list(samples), False

    def cards(self):
        return list(CARDS)

    def read(self, cards):
        return self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]

    def close(self):
        self.closed = True


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def busy(watts: float | None = 300.0, *, util: float | None = 90.0) -> Reading:
    return Reading(6144.0, 24576.0, util, 40.0, watts, 61.0)


def rows(path) -> list[dict[str, str]]:
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle))


def test_gpu_csv_has_the_columns_of_the_contract_and_a_line_per_card_and_sample(tmp_path):
    clock = Clock()
    sampler = Sampler(tmp_path, Scripted([busy(), busy(310.26)], [NOTHING, busy()]), CARDS, clock=clock)
    sampler.sample()
    clock.now += 2
    sampler.sample()
    text = (tmp_path / "gpu.csv").read_text()
    assert text.splitlines()[0] == (
        "ts,elapsed_s,gpu_index,memory_used_mib,memory_total_mib,util_gpu,util_mem,power_draw_w,temp_c"
    )
    found = rows(tmp_path / "gpu.csv")
    assert [line["gpu_index"] for line in found] == ["5", "7", "5", "7"]
    assert [line["elapsed_s"] for line in found] == ["0.000", "0.000", "2.000", "2.000"]
    assert found[1]["power_draw_w"] == "310.3"
    assert {found[2][name] for name in GPU_COLUMNS[3:]} == {""}, "a card that does not answer leaves empty fields"
    assert all(line["ts"].endswith("Z") for line in found)


def test_means_are_of_each_card_and_over_the_samples_that_have_the_value(tmp_path):
    samples = ([busy(100.0, util=50.0), busy(300.0)], [busy(None, util=None), busy(100.0)], [NOTHING, busy(200.0)])
    sampler = Sampler(tmp_path, Scripted(*samples), CARDS)
    for _ in samples:
        sampler.sample()
    first, second = sampler.cards_series
    assert first.summary("util_gpu").mean == 50.0, "not 50 / 3"
    assert (first.summary("power_draw_w").mean, first.summary("power_draw_w").samples) == (100.0, 1)
    assert (second.summary("power_draw_w").mean, second.summary("power_draw_w").peak) == (200.0, 300.0)
    assert (first.samples, first.incomplete, second.incomplete) == (3, 2, 0)


def test_a_quantity_that_no_sample_has_is_none_and_not_zero():
    series = Series()
    series.add(None)
    assert (series.summary().mean, series.summary().peak, series.summary().samples) == (None, None, 0)


@pytest.mark.parametrize(
    ("start", "stop", "joules"),
    [
        (0.0, 6.0, 100 * 2 / 2 + 100 * 2 + (100 + 400) / 2 * 2),  # 0 to 100 W, then 100 W, then 100 to 400 W
        (2.0, 4.0, 200.0),
        (1.0, 3.0, (50 + 100) / 2 + 100),
        (5.0, 9.0, (250 + 400) / 2),  # nothing is assumed after the last sample
        (3.0, 3.5, 50.0),
    ],
)
def test_energy_is_the_integral_of_power_in_the_window(start, stop, joules):
    card = CardSeries()
    for moment, watts in ((0.0, 0.0), (2.0, 100.0), (4.0, 100.0), (6.0, 400.0)):
        card.add(moment, busy(watts))
    assert card.energy_j(start, stop) == pytest.approx(joules)


def test_energy_goes_straight_over_samples_without_power():
    card = CardSeries()
    for moment, watts in ((0.0, 100.0), (2.0, None), (4.0, 300.0)):
        card.add(moment, busy(watts))
    assert card.energy_j(0.0, 4.0) == pytest.approx(200 * 4)


@pytest.mark.parametrize("window", [(7.0, 9.0), (3.0, 3.0), (5.0, 4.0)])
def test_energy_of_a_window_without_samples_is_none(window):
    card = CardSeries()
    card.add(0.0, busy())
    card.add(6.0, busy())
    assert card.energy_j(*window) is None
    assert CardSeries().energy_j(0.0, 1.0) is None


def test_energy_of_all_cards_is_their_sum_and_none_if_one_of_them_is_silent(tmp_path):
    clock = Clock()
    for script, expected in (([busy(100.0), busy(50.0)], 300.0), ([busy(100.0), busy(None)], None)):
        sampler = Sampler(tmp_path, Scripted(script), CARDS, clock=clock)
        for _ in range(2):
            sampler.sample()
            clock.now += 2
        assert sampler.energy_j(clock.now - 4, clock.now - 2) == expected


def test_without_cards_only_the_host_is_sampled(tmp_path):
    sampler = Sampler(tmp_path)
    sampler.sample()
    assert not (tmp_path / "gpu.csv").exists()
    (line,) = rows(tmp_path / "host.csv")
    assert tuple(line) == HOST_COLUMNS == ("ts", "elapsed_s", "process_rss_mib", "process_cpu_percent", "load_1min")
    assert 10 < float(line["process_rss_mib"]) < 100_000


def test_the_thread_samples_at_once_at_its_interval_and_at_the_end(tmp_path):
    source = Scripted([busy(), busy()])
    sampler = Sampler(tmp_path, source, CARDS, interval_s=0.02)
    sampler.start()
    deadline = time.monotonic() + 20
    while sampler.cards_series[0].samples < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    before = sampler.cards_series[0].samples
    sampler.stop()
    sampler.stop()
    assert before >= 4
    assert sampler.cards_series[0].samples > before
    assert source.closed
    assert len(rows(tmp_path / "gpu.csv")) == 2 * sampler.cards_series[0].samples


def test_a_source_that_breaks_ends_the_sampling_and_not_the_run(tmp_path):
    class Broken(Scripted):
        def read(self, cards):
            raise RuntimeError("driver on fire")

    sampler = Sampler(tmp_path, Broken([]), CARDS, interval_s=0.01)
    sampler.start()
    sampler.stop()
    assert sampler.lost_reason == "sampling ended: RuntimeError: driver on fire"


def test_a_full_disk_ends_the_files_and_the_means_go_on(tmp_path):
    sampler = Sampler(tmp_path / "not there", Scripted([busy(), busy()]), CARDS)
    sampler.sample()
    sampler.sample()
    assert "the files end at" in sampler.lost_reason
    assert sampler.cards_series[0].samples == 2


def test_a_run_that_goes_on_in_its_folder_adds_to_the_file_under_one_header(tmp_path):
    for _ in range(2):
        Sampler(tmp_path, Scripted([busy(), busy()]), CARDS, interval_s=60).sample()
    assert (tmp_path / "gpu.csv").read_text().count("ts,elapsed_s") == 1
    assert len(rows(tmp_path / "gpu.csv")) == 4
