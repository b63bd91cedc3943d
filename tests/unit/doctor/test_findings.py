"""The doctor's other lines: each status brought about by the fact it stands for, each with its way out."""

from __future__ import annotations

import json
import sys

import psutil
import pytest
import torch

from traceforge import cli
from traceforge.doctor.attention import look_at_attention
from traceforge.doctor.cards import CudaCard, look_at_cards
from traceforge.doctor.examination import examine
from traceforge.doctor.findings import Finding, guarded
from traceforge.doctor.four_bit import look_at_four_bit
from traceforge.doctor.group import look_at_group
from traceforge.doctor.host import look_at_disk, look_at_memory, look_at_processor
from traceforge.doctor.libraries import Stack, installed, look_at_libraries
from traceforge.doctor.transfers import look_at_transfers
from traceforge.models.kernels import CpuFlash
from traceforge.monitor.readings import Card, MonitorError

CPU = torch.device("cpu")
GIB = 2**30


def test_a_finding_that_is_not_well_without_a_way_out_is_our_own_mistake():
    with pytest.raises(AssertionError, match="way out"):
        Finding("disk", "warn", "low")


def test_a_check_that_breaks_is_a_finding_and_the_others_are_made():
    def broken():
        raise OSError("no such device\nsecond line")

    found = guarded("copies", broken, way_out="report it")
    assert (found.status, found.text) == ("fail", "OSError: no such device")


@pytest.mark.parametrize(("flags", "status"), [("avx512f amx_bf16", "pass"), ("avx2 fma", "warn")])
def test_a_processor_without_bfloat16_instructions_is_told_to_take_float32(tmp_path, flags, status):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: Some CPU\nflags\t\t: {flags}\n")
    found = look_at_processor(cpuinfo)
    assert found.status == status
    assert "Some CPU" in found.text
    assert ("float32" in (found.way_out or "")) == (status == "warn")


def test_memory_is_what_a_container_leaves(tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{psutil.Process().memory_info().rss + GIB}\n")
    found = look_at_memory((str(limit),))
    assert found.status == "warn"
    assert "limit of the container" in found.text
    assert found.figures["free_bytes"] == pytest.approx(GIB, rel=0.1)
    limit.write_text("max\n")
    assert "container" not in look_at_memory((str(limit),)).text


@pytest.mark.parametrize(("gib", "status"), [(100, "pass"), (5, "warn"), (0.05, "fail")])
def test_the_disk_is_that_of_the_output_folder_also_before_it_exists(tmp_path, monkeypatch, gib, status):
    asked = []

    def usage(path):
        asked.append(path)
        return type("Usage", (), {"free": int(gib * GIB)})

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert look_at_disk(tmp_path / "runs" / "deep").status == status
    assert asked == [tmp_path]


AMPERE = {"torch": "2.10.0+cu128", "triton": "3.5.0"}


@pytest.mark.parametrize(
    ("stack", "faults"),
    [
        (Stack(AMPERE, "12.8", (8, 6)), ["known: cublas"]),
        (Stack({**AMPERE, "nvidia-cublas-cu12": "12.8.4.1"}, "12.8", (8, 0)), ["known: cublas"]),
        (Stack({**AMPERE, "nvidia-cublas-cu12": "12.9.1.4"}, "12.8", (8, 6)), []),
        (Stack({**AMPERE, "torch": "2.12.0"}, "12.8", (8, 6)), []),
        (Stack(AMPERE, "12.6", (8, 6)), []),
        (Stack(AMPERE, "12.8", (9, 0)), []),
        (Stack({"torch": "2.13.0"}, None, None), []),
        (Stack({"torch": "2.13.0"}, "13.0", (9, 0)), ["known: triton"]),
        (Stack({"torch": "2.13.0", "pynvml": "12.0.0"}), ["known: pynvml"]),
    ],
)
def test_a_known_fault_is_told_where_it_applies_and_nowhere_else(stack, faults):
    first, *others = look_at_libraries(stack, required=[])
    assert first.status == "pass"
    assert [finding.name for finding in others] == faults


@pytest.mark.parametrize(
    ("versions", "status", "words"),
    [
        ({"torch": "2.13.0", "peft": "0.21"}, "pass", "torch 2.13.0"),
        ({"torch": "2.10.0+cu128", "peft": "0.21"}, "warn", "torch is 2.10.0+cu128"),
        ({"torch": "2.13.0"}, "fail", "peft is missing"),
    ],
)
def test_required_versions_are_compared_with_what_is_installed(versions, status, words):
    found = look_at_libraries(Stack(versions), required=["torch>=2.11", "peft>=0.18", "trl>=1; extra == 'oracle'"])[0]
    assert found.status == status
    assert words in found.text


def test_the_versions_installed_here_are_found_under_their_usual_names():
    found = installed()
    assert found["torch"] == torch.__version__
    assert {"huggingface-hub", "pydantic"} <= set(found)


class _Source:
    name = "NVML"

    def close(self):
        pass


def _driver(*cards: Card):
    return lambda: (_Source(), list(cards))


def _no_driver():
    raise MonitorError("nvidia-smi is not on the PATH")


TOLD = Card(0, "GPU-aa", "RTX 3090", 24576.0, "580.65", "gen 1 x16 of gen 4 x16")
FREE = CudaCard("RTX 3090", "aa", (8, 6), 24 * GIB, 23 * GIB)
OLD = CudaCard("T4", "aa", (7, 5), 15 * GIB, 15 * GIB)
TAKEN = CudaCard("RTX 3090", "aa", (8, 6), 24 * GIB, 9 * GIB)


@pytest.mark.parametrize(
    ("usable", "build", "visible", "opener", "expected"),
    [
        ([FREE], "12.8", None, _driver(TOLD), [("driver", "pass"), ("card", "pass")]),
        ([FREE], "12.8", None, _no_driver, [("driver", "warn"), ("card", "pass")]),
        ([OLD], "12.8", None, _driver(TOLD), [("driver", "pass"), ("card", "warn")]),
        ([TAKEN], "12.8", None, _driver(TOLD), [("driver", "pass"), ("card", "warn")]),
        ([], None, None, _no_driver, [("card", "warn")]),
        ([], "12.8", None, _no_driver, [("card", "warn")]),
        ([], None, None, _driver(TOLD), [("driver", "fail")]),
        ([], "12.8", None, _driver(TOLD), [("driver", "fail")]),
        ([], "12.8", "", _driver(TOLD), [("driver", "warn")]),
        ([], "12.8", "-1", _driver(TOLD), [("driver", "warn")]),
    ],
)  # fmt: skip
def test_driver_torch_and_cards_are_told_as_they_stand_to_each_other(usable, build, visible, opener, expected):
    found = look_at_cards(usable, cuda_build=build, visible=visible, opener=opener)
    assert [(finding.name, finding.status) for finding in found] == expected


def test_a_card_is_told_with_its_memory_and_its_link():
    _, card = look_at_cards([FREE], cuda_build="12.8", opener=_driver(TOLD))
    assert card.text == "RTX 3090, capability 8.6, 23.0 GiB free of 24.0, PCIe gen 1 x16 of gen 4 x16"


class Wrong(CpuFlash):
    name = "wrong"

    def forward(self, *arguments, **keywords):
        output, logsumexp = super().forward(*arguments, **keywords)
        return output * 1.01, logsumexp


class Absent(CpuFlash):
    name = "absent"

    def forward(self, *arguments, **keywords):
        raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("kernels", "status", "words"),
    [
        ([CpuFlash()], "pass", "cpu_flash"),
        ([Wrong(), CpuFlash()], "warn", "wrong is wrong"),
        ([Absent(), CpuFlash()], "warn", "absent does not run"),
        ([Wrong(), Absent()], "fail", "no kernel image"),
    ],
)
def test_attention_kernels_that_run_and_are_right_are_told_with_their_speed(kernels, status, words):
    found = look_at_attention(CPU, torch.float32, kernels=kernels, tokens=256)
    assert found.status == status
    assert words in found.text
    assert ("cpu_flash_forward_tflops" in found.figures) == (status != "fail")


def test_linears_in_four_bits_are_right_here():
    found = look_at_four_bit(CPU, torch.float32)
    assert found.status == "pass"
    assert found.figures["forward_error"] < 1e-4


def repacking(monkeypatch, *, heeds_the_switch: bool) -> None:
    """Let 4-bit linears spoil their weights at the first pass in evaluation mode, as on CPUs with AVX512-BF16."""
    import bitsandbytes

    real = bitsandbytes.nn.Linear4bit.forward
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)

    def forward(self, x):
        if not self.training and (self.support_avx512bf16_for_cpu or not heeds_the_switch):
            self.weight.data = self.weight.data.roll(1, 0)
        switch, self.support_avx512bf16_for_cpu = self.support_avx512bf16_for_cpu, False
        try:
            return real(self, x)
        finally:
            self.support_avx512bf16_for_cpu = switch

    monkeypatch.setattr(bitsandbytes.nn.Linear4bit, "forward", forward)


def test_the_repacking_trap_is_told_and_harmless_because_it_is_switched_off(monkeypatch):
    repacking(monkeypatch, heeds_the_switch=True)
    found = look_at_four_bit(CPU, torch.float32)
    assert found.status == "pass"
    assert found.figures["repacking_cpu"] is True
    assert found.figures["error_with_repacking"] > 0.5
    assert found.figures["backward_error"] < 1e-4


def test_a_trap_that_cannot_be_switched_off_is_a_failure(monkeypatch):
    repacking(monkeypatch, heeds_the_switch=False)
    found = look_at_four_bit(CPU, torch.float32)
    assert found.status == "fail"
    assert "quantization = 'none'" in found.way_out


def test_two_ranks_meet_on_the_loopback_address():
    assert look_at_group().status == "pass"


def test_copies_within_the_host_are_measured():
    assert look_at_transfers(CPU).figures["host_gb_per_s"] > 0.1


def test_the_whole_examination_is_true_of_this_machine(tmp_path):
    found = examine(output_dir=tmp_path, device=CPU)
    names = [finding.name for finding in found.findings]
    assert {"processor", "memory", "disk", "libraries", "attention", "4-bit", "copies", "ranks"} <= set(names)
    assert not [finding for finding in found.failures if finding.name not in {"driver", "libraries"}]
    short = examine(short=True, output_dir=tmp_path, device=CPU)
    assert "attention" not in {finding.name for finding in short.findings}


def test_the_command_prints_one_document_and_its_exit_code_is_that_of_its_failures(monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["traceforge", "doctor", "--short", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code), capsys.readouterr().out

    monkeypatch.setattr("traceforge.doctor.examination.look_at_cards", lambda *_, **__: [])
    monkeypatch.setattr("traceforge.doctor.examination.look_at_libraries", lambda *_: [])
    code, out = run("--json")
    assert (code, json.loads(out)["counts"]["fail"]) == (0, 0)
    bad = Finding("libraries", "fail", "peft is missing", "pip install peft")
    monkeypatch.setattr("traceforge.doctor.examination.look_at_libraries", lambda *_: [bad])
    code, out = run()
    assert code == 1
    assert "fail  libraries" in out
    assert "way out: pip install peft" in out


def test_the_short_form_leaves_no_trace(tmp_path):
    state = torch.get_rng_state()
    examine(short=True, output_dir=tmp_path / "runs", device=CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert not (tmp_path / "runs").exists()
