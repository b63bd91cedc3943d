"""Cards as NVML and nvidia-smi tell of them: the odd answers too, and which of them are the run's own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_nvml import FakeCard, FakeNvml

from traceforge.monitor.nvidia_smi import NvidiaSmi, run_tool
from traceforge.monitor.nvml import Nvml
from traceforge.monitor.readings import NOTHING, Card, MonitorError, Reading, number_or_none, select_cards
from traceforge.monitor.sources import open_source

FULL = Reading(6144.0, 24576.0, 97.0, 40.0, 300.0, 61.0)
DESCRIBED = (
    "0, GPU-aaaa1111, NVIDIA GeForce RTX 3090, 24576, 580.65.06, 1, 16, 4, 16\n"
    "1, GPU-bbbb2222, NVIDIA GeForce RTX 3090, 24576, 580.65.06, [N/A], [N/A], [N/A], [N/A]\n"
)
LISTED = "GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-aaaa1111)\nGPU 1: NVIDIA GeForce RTX 3090 (UUID: GPU-bbbb2222)\n"
MIG_DESCRIBED = "0, GPU-cccc3333, NVIDIA A100-SXM4-40GB, 40960, 550.54.15, 4, 16, 4, 16\n"
MIG_LISTED = (
    "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-cccc3333)\n"
    "  MIG 3g.20gb     Device  0: (UUID: MIG-1111-2222)\n"
    "  MIG 1g.5gb      Device  1: (UUID: MIG-3333-4444)\n"
)


def nvml(monkeypatch, *cards: FakeCard, driver: bool = True) -> FakeNvml:
    """Install a fake pynvml."""
    module = FakeNvml(*cards, driver=driver)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def smi(sample: str, *, described: str = DESCRIBED, listed: str = LISTED) -> NvidiaSmi:
    """Return nvidia-smi with recorded answers."""

    def run(command):
        if command[1] == "-L":
            return listed
        return described if "uuid" in command[1] else sample

    return NvidiaSmi(run)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("350.12", 350.12), (" 97 ", 97.0), ("24576 MiB", 24576.0), ("0", 0.0), ("-3", -3.0),
        ("N/A", None), ("[N/A]", None), ("[Not Supported]", None), ("[Unknown Error]", None), ("", None),
        ("[Insufficient Permissions]", None), ("ERR!", None), ("nan", None), ("[GPU is lost]", None),
    ],
)  # fmt: skip
def test_a_driver_s_text_is_a_number_or_nothing(text, value):
    assert number_or_none(text) == value


def test_nvml_tells_of_cards_and_reads_them_in_the_units_of_the_file(monkeypatch):
    module = nvml(monkeypatch, FakeCard("GPU-aaaa"), FakeCard("GPU-bbbb", watts=125.5))
    source = Nvml()
    cards = source.cards()
    assert [(card.index, card.uuid, card.driver) for card in cards] == [
        (0, "GPU-aaaa", "580.65.06"),
        (1, "GPU-bbbb", "580.65.06"),
    ]
    assert cards[0].pcie_link == "gen 1 x16 of gen 4 x16"
    assert source.read(cards) == [FULL, Reading(6144.0, 24576.0, 97.0, 40.0, 125.5, 61.0)]
    source.close()
    assert module.open == 0


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        (("utilization",), Reading(6144.0, 24576.0, None, None, 300.0, 61.0)),
        (("power",), Reading(6144.0, 24576.0, 97.0, 40.0, None, 61.0)),
        (("temperature", "memory"), Reading(None, None, 97.0, 40.0, 300.0, None)),
    ],
)
def test_a_question_that_nvml_does_not_answer_leaves_the_others(monkeypatch, refused, expected):
    nvml(monkeypatch, FakeCard("GPU-aaaa", refused=refused))
    source = Nvml()
    assert source.read(source.cards()) == [expected]


def test_nvml_tells_of_mig_instances_and_reads_what_they_have(monkeypatch):
    instance = FakeCard("MIG-1111", refused=("utilization", "power", "temperature"))
    nvml(monkeypatch, FakeCard("GPU-cccc", refused=("utilization",), instances=(instance,)))
    source = Nvml()
    whole, part = source.cards()
    assert (part.uuid, part.index, part.mig_of) == ("MIG-1111", 0, whole.uuid)
    assert source.read([part]) == [Reading(6144.0, 24576.0, None, None, None, None)]


def test_a_card_that_is_lost_gives_nothing_and_the_others_go_on(monkeypatch):
    gone = FakeCard("GPU-aaaa")
    nvml(monkeypatch, gone, FakeCard("GPU-bbbb"))
    source = Nvml()
    cards = source.cards()
    gone.lost = True
    assert source.read(cards) == [NOTHING, FULL]


def test_nvidia_smi_tells_of_cards_and_reads_them():
    source = smi("0, 6144, 24576, 97, 40, 300.00, 61\n1, 10, 24576, 0, 0, 21.53, 34\n")
    cards = source.cards()
    assert [card.pcie_link for card in cards] == ["gen 1 x16 of gen 4 x16", None]
    assert source.read(cards) == [FULL, Reading(10.0, 24576.0, 0.0, 0.0, 21.53, 34.0)]


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ("0, 6144, 24576, [N/A], [N/A], [Not Supported], 61\n", Reading(6144.0, 24576.0, None, None, None, 61.0)),
        ("0, 6144, 24576, 97, 40\n", Reading(6144.0, 24576.0, 97.0, 40.0, None, None)),
        ("0, 6144, 24576, 97, 4", Reading(6144.0, 24576.0, 97.0, None, None, None)),
        ("0, 6144, 24576, 97, 40, 300.00, 6", Reading(6144.0, 24576.0, 97.0, 40.0, 300.0, None)),
        ("Failed to initialize NVML: Driver/library version mismatch\n", NOTHING),
        ("Unable to determine the device handle for GPU0000:17:00.0: GPU is lost.\n", NOTHING),
        ("0", NOTHING),
        ("", NOTHING),
    ],
)
def test_a_sample_that_is_odd_or_cut_is_used_as_far_as_it_goes_whole(sample, expected):
    source = smi(sample)
    assert source.read(source.cards()[:1]) == [expected]


def test_a_tool_that_vanished_gives_nothing():
    source = smi("0, 6144, 24576, 97, 40, 300.00, 61\n")
    cards = source.cards()

    def gone(command):
        raise FileNotFoundError("nvidia-smi is not on the PATH")

    source._run = gone
    assert source.read(cards) == [NOTHING, NOTHING]


def test_of_a_mig_instance_nvidia_smi_says_nothing_rather_than_what_the_whole_card_does():
    source = smi("0, 20000, 40960, [N/A], [N/A], 250.00, 50\n", described=MIG_DESCRIBED, listed=MIG_LISTED)
    whole, first, second = source.cards()
    assert (first.uuid, first.mig_of, second.uuid) == ("MIG-1111-2222", whole.uuid, "MIG-3333-4444")
    assert source.read([whole, first]) == [Reading(20000.0, 40960.0, None, None, 250.0, 50.0), NOTHING]


CARDS = [
    *(Card(index, f"GPU-{index}{index}{index}a-0") for index in range(8)),
    Card(7, "MIG-7-1", mig_of="GPU-777a-0"),
]


@pytest.mark.parametrize(
    ("wanted", "uuids"),
    [
        (("5", "7"), ["GPU-555a-0", "GPU-777a-0"]),
        (("7", "5"), ["GPU-777a-0", "GPU-555a-0"]),
        (("GPU-555a-0", "GPU-77"), ["GPU-555a-0", "GPU-777a-0"]),
        (("555a-0",), ["GPU-555a-0"]),  # as torch writes it
        (("MIG-7-1",), ["MIG-7-1"]),
        ((), []),
        (None, [f"GPU-{index}{index}{index}a-0" for index in range(8)]),
    ],
)
def test_the_run_s_own_cards_are_chosen_by_number_uuid_or_its_beginning_in_its_own_order(wanted, uuids):
    assert [card.uuid for card in select_cards(CARDS, wanted)] == uuids


@pytest.mark.parametrize(("wanted", "words"), [(("9",), "no card"), (("GPU-",), "8 cards"), (("GPU-9",), "no card")])
def test_an_entry_that_names_no_card_or_several_is_refused(wanted, words):
    with pytest.raises(MonitorError, match=words):
        select_cards(CARDS, wanted)


def test_nvidia_smi_is_taken_where_nvml_cannot_be_loaded_or_has_no_driver(monkeypatch):
    fall_back = smi("")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_source((Nvml, lambda: fall_back))[0] is fall_back
    nvml(monkeypatch, FakeCard("GPU-a"), driver=False)
    assert open_source((Nvml, lambda: fall_back))[0] is fall_back
    nvml(monkeypatch, FakeCard("GPU-a"))
    assert open_source((Nvml, lambda: fall_back))[0].name == "NVML"


def test_without_either_the_error_says_what_each_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MonitorError, match="nvidia-ml-py is not installed; nvidia-smi: nvidia-smi is not on the PATH"):
        open_source()


def test_a_driver_that_does_not_answer_is_no_source():
    broken = smi("", described="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
    with pytest.raises(MonitorError, match="couldn't communicate"):
        broken.cards()


def test_a_tool_that_hangs_is_stopped_and_what_it_wrote_is_kept(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0, 6144, 24576'\nexec /bin/sleep 30\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("traceforge.monitor.nvidia_smi._TIME_LIMIT_S", 0.5)
    assert run_tool(("nvidia-smi", "-L")) == "0, 6144, 24576"


def test_importing_the_monitor_imports_neither_torch_nor_nvml():
    program = (
        "import sys, traceforge.monitor.sources, traceforge.monitor.sampler; "
        "print(sorted({'torch', 'pynvml'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
