"""What the end-to-end tests share: the command line as a process, a tiny model folder, small logs, the demo's model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from traceforge import cli

ROOT = Path(__file__).parents[2]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Return the one document on stdout."""
        return json.loads(self.out)


def start(arguments: Sequence[str | Path], folder: Path, **options: Any) -> subprocess.Popen[str]:
    """Start `traceforge` as a process in a folder, without network and with one thread."""
    return subprocess.Popen(
        [sys.executable, "-c", "from traceforge.cli import main; main()", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*arguments: str | Path, folder: Path, **options: Any) -> Ended:
    """Run a command to its end."""
    process = start(arguments, folder, **options)
    out, err = process.communicate(timeout=850)
    return Ended(process.returncode, out, err)


@pytest.fixture
def traceforge(tmp_path, monkeypatch) -> Callable[..., Ended]:
    """The command line in this process, from arguments to exit code, in the test's own folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Ended:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["traceforge", *map(str, arguments)])
        monkeypatch.setitem(cli._state, "debug", False)
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main()
        return Ended(int(ended.value.code or 0), out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as the demo prepares it, where the demo and the CPU examples look for it."""
    from traceforge.demo.model import MODEL_FOLDER, prepare_model

    return prepare_model(ROOT / MODEL_FOLDER)


@pytest.fixture(scope="session")
def shallow_smollm2(smollm2, tmp_path_factory) -> Path:
    """The first two of its thirty layers, its tokenizer and its template: the same tokens, less arithmetic."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / smollm2.name
    AutoModelForCausalLM.from_pretrained(smollm2, num_hidden_layers=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A folder with a random two-layer Llama in float32 and a tokenizer of one token a byte with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.tiny_models import tiny_network

    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )
    tiny_network("llama", vocabulary=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversation(task: str, *, turns: int = 3) -> dict[str, Any]:
    """Return a chat row of an agent with `turns` turns and the observations between them."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Solve {task}."}]
    for turn in range(turns):
        messages.append({"role": "assistant", "content": f"Look {turn} at {task}."})
        if turn + 1 < turns:
            messages.append({"role": "user", "content": f"Seen {turn}."})
    return {"id": f"run-{task}", "task_id": task, "messages": messages}


def write_logs(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def samples(tmp_path, traceforge) -> Path:
    """A built data set of four small tasks with three turns each."""
    write_logs(tmp_path / "logs.jsonl", [conversation(f"task-{number}") for number in range(4)])
    assert traceforge("ingest", "logs.jsonl", "-o", "trajectories").code == 0
    assert traceforge("build", "sft", "trajectories", "-o", "samples").code == 0
    return tmp_path / "samples"


@pytest.fixture
def run_file(tmp_path, tiny_model, samples) -> Path:
    """A run of six updates of the tiny model in float32."""
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
run_name = "tiny"
[model]
name_or_path = "{tiny_model}"
dtype = "float32"
[adapter]
rank = 4
[data]
train = "{samples}"
evaluation_fraction = 0.25
max_tokens = 512
[optimizer]
learning_rate = 1e-2
[training]
updates = 6
samples_per_update = 3
""",
        encoding="utf-8",
    )
    return path
