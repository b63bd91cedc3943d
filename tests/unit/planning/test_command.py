"""`traceforge plan`: verdicts and exit codes of the shipped run files, ways out that work, where shapes are found."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from traceforge import cli
from traceforge.errors import ModelError
from traceforge.planning.model_config import find_shape
from traceforge.planning.rates import rates_of

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
SFT, SIMPO = EXAMPLES / "sft_qlora_32k_1gpu.toml", EXAMPLES / "simpo_qlora_80k_1gpu.toml"
LORA = EXAMPLES / "sft_lora_16k_1gpu.toml"
OWN_LAYERS = ["--set", "memory.path=auto", "--set", "memory.recompute_layers=true"]
GIB = 2**30


@pytest.fixture
def plan(monkeypatch, capsys, tmp_path):
    """The command in this process, in an empty folder, without a network and without a hub cache."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("planning opened a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["traceforge", "plan", *map(str, arguments)])
        monkeypatch.setitem(cli._state, "debug", False)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return call


@pytest.mark.parametrize("run_file", [SFT, SIMPO], ids=lambda path: path.stem)
@pytest.mark.parametrize(("gib", "code"), [(6, 3), (12, 0), (24, 0)])
def test_the_8b_examples_have_a_table_a_verdict_and_an_exit_code(plan, run_file, gib, code):
    found, out, err = plan(run_file, "--gpu-gib", gib, "--host-gib", 64)
    assert (found, err) == (code, "")
    first = out.splitlines()[0]
    assert (" does not fit " if code else " fits ") in first
    assert f"a card of {gib} GiB" in first
    assert re.search(r"^  weights +3\.34 +15\.26$", out, flags=re.M)
    assert "peak with one technique off" in out
    assert "longest row that fits" in out


def test_host_memory_is_a_budget_of_its_own(plan):
    code, out, _ = plan(SIMPO, "--gpu-gib", 24, "--host-gib", 32, "--json")
    told = json.loads(out)
    assert code == 3
    assert told["device_bytes"] < 12 * GIB
    assert told["host_bytes"] > 48 * GIB
    assert sum(told["pinned"].values()) + sum(told["pageable"].values()) == told["host_bytes"]
    assert plan(SIMPO, "--gpu-gib", 24)[0] == 0, "what is not said is not checked"


@pytest.mark.parametrize(
    ("run_file", "gib", "host", "extra"),
    [
        (SFT, 12, 64, ["--set", "memory.path=generic", "--set", "memory.recompute_layers=true"]),
        (SFT, 12, 32, []),
        (SFT, 7.5, 64, []),
        (SIMPO, 24, 40, []),
        (SIMPO, 24, 24, []),
        (LORA, 12, 64, OWN_LAYERS),
        (LORA, 5, 64, OWN_LAYERS),
        (LORA, 4, 64, []),
    ],
)  # fmt: skip
def test_every_way_out_makes_it_fit_when_it_is_typed(plan, run_file, gib, host, extra):
    arguments = (run_file, "--gpu-gib", gib, "--host-gib", host)
    code, out, _ = plan(*arguments, *extra, "--json")
    told = json.loads(out)
    assert code == 3
    assert told["ways_out"]
    for way in told["ways_out"]:
        changes = [word for setting in way["settings"] for word in ("--set", setting)]
        code, out, err = plan(*arguments, *extra, *changes, "--json")
        assert code == 0, f"{way}: {err}"
        assert json.loads(out)["device_bytes"] == pytest.approx(way["device_bytes"], rel=0.01)


def test_a_way_out_that_is_printed_can_be_typed(plan):
    _, out, _ = plan(LORA, "--gpu-gib", 12, "--host-gib", 64, *OWN_LAYERS)
    assert "  --set memory.recompute_layers=false --set memory.path=lean  (" in out


def test_the_demo_is_planned_for_the_cpu_and_its_way_out_is_an_environment_variable(plan, monkeypatch):
    demo = ROOT / "src" / "traceforge" / "demo" / "sft_demo_cpu.toml"
    config = ROOT / "tests" / "data" / "model_configs" / "smollm2-135m.json"
    arguments = (demo, "--model-config", config, "--row-tokens", 2888, "--host-gib")
    assert plan(*arguments, 5)[0] == 0
    code, out, _ = plan(*arguments, 3)
    assert code == 3
    assert "MALLOC_MMAP_THRESHOLD_=1048576 before the command" in out
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1048576")
    assert plan(*arguments, 3)[0] == 0


def test_the_document_says_what_the_textbook_says(plan):
    _, out, _ = plan(SFT, "--gpu-gib", 24, "--row-tokens", 32768, "--json")
    told = json.loads(out)
    book = told["without_techniques"]
    assert told["trained_parameters"] == 43_646_976
    assert book["scores_per_head"] == 2 * GIB
    assert book["attention"] == 2304 * GIB
    assert book["logits_16_bit"] / GIB == pytest.approx(9.2734, abs=5e-5)
    assert book["activations"] == 9 * GIB
    assert sum(told["peak"]["parts"].values()) == told["device_bytes"] == max(told["moments"].values())
    worth = {each["technique"]: each["device_bytes"] for each in told["without_one"]}
    assert set(worth) == {"weights in 4 bits", "LoRA", "activations on the host", "logits in chunks", "fused attention"}
    assert all(size > told["device_bytes"] for size in worth.values())


def test_time_and_energy_are_told_for_a_card_that_was_measured_and_for_no_other(plan):
    _, out, _ = plan(SFT, "--gpu-gib", 141, "--card", "NVIDIA H200", "--row-tokens", 32768)
    assert re.search(r"one row, forward and backward: 4\.\d s; energy not known", out)
    code, _, err = plan(SFT, "--card", "RTX 3090")
    assert (code, "not measured; known: H200" in err) == (2, True)
    assert rates_of("nvidia h200").matmul_tflops == 740


def test_a_model_that_is_not_here_has_a_way_out(plan, tmp_path):
    code, out, err = plan(SFT, "--set", "model.name_or_path=someone/other-8B")
    assert (code, out) == (2, "")
    assert "--model-config config.json" in err
    own = tmp_path / "config.json"
    own.write_text((ROOT / "tests" / "data" / "model_configs" / "llama-3.1-8b.json").read_text())
    code, out, _ = plan(SFT, "--set", "model.name_or_path=someone/other-8B", "--model-config", own, "--json")
    assert json.loads(out)["parameters"] == 8_030_261_248


def test_a_model_is_found_in_the_hub_s_cache_at_its_revision(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "a" * 40
    folder = tmp_path / "models--someone--other-8B" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((ROOT / "tests" / "data" / "model_configs" / "qwen2.5-0.5b.json").read_text())
    assert find_shape("someone/other-8B", revision=commit).parameters() == 494_032_768
    with pytest.raises(ModelError, match="not in the hub's cache"):
        find_shape("someone/other-8B", revision="b" * 40)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "mixtral"}', "model_type 'mixtral' cannot be planned"),
        ('{"model_type": "llama"}', "sizes are missing"),
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused_by_name(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=words):
        find_shape("model", given=path)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*_1gpu.toml")), ids=lambda path: path.stem)
def test_every_shipped_gpu_run_file_can_be_planned_offline(plan, path):
    code, out, err = plan(path, "--gpu-gib", 80, "--host-gib", 256)
    assert (code, err) == (0, ""), out


class Tags(HTMLParser):
    """Counts tags, and collects what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.loads += [
            value for name, value in attrs if name in {"src", "href"} and value and not value.startswith("data:")
        ]


def test_the_page_is_whole_in_itself_and_draws_a_dumbbell_for_each_technique(plan, tmp_path):
    page = tmp_path / "plan.html"
    assert plan(SFT, "--gpu-gib", 24, "--host-gib", 64, "--html", page)[0] == 0
    text = page.read_text()
    read = Tags()
    read.feed(text)
    assert read.loads == []
    assert "script" not in read.tags
    assert read.tags["circle"] == 2 * 6, "five techniques and the textbook"
    assert "default-src 'none'" in text
    places = re.findall(r'<circle class="planned" cx="([\d.]+)%"', text)
    assert len(set(places)) == 1
    others = [float(place) for place in re.findall(r'<circle class="other" cx="([\d.]+)%"', text)]
    assert others == sorted(others)
    assert all(float(places[0]) < place <= 100 for place in others)
    limit = float(re.findall(r'<line class="limit" x1="([\d.]+)%"', text)[0])
    assert float(places[0]) < limit


def test_planning_imports_no_torch():
    program = (
        "import sys; from traceforge import cli; sys.argv = ['traceforge', 'plan', sys.argv[1], '--gpu-gib', '24']\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(SFT)], capture_output=True, text=True, check=True)
    assert ended.stderr == "[]\n"
