"""The command line: help pages, exit codes, errors without tracebacks, and no torch where none is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from tests.help_pages import COMMANDS, help_page, page_file

from traceforge import cli
from traceforge.errors import DisagreementError, InputError, StorageError


def run_cli(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["traceforge", *arguments])
    monkeypatch.setitem(cli._state, "debug", False)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    return int(ended.value.code), shown.out, shown.err


def all_commands() -> dict[str, object]:
    """Return every command by the words that call it."""
    found: dict[str, object] = {}

    def walk(words: tuple[str, ...], command: object) -> None:
        found[" ".join(words)] = command
        for name, child in getattr(command, "commands", {}).items():
            walk((*words, name), child)

    walk((), typer.main.get_command(cli.app))
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_page_is_the_frozen_one(command):
    frozen = page_file(command).read_text(encoding="utf-8")
    assert help_page(command) == frozen, "if this change is meant: python -m tests.help_pages"


def test_every_command_has_a_frozen_page():
    assert set(COMMANDS) == set(all_commands())


def test_every_command_that_does_something_takes_json_and_debug():
    for words, command in all_commands().items():
        if not hasattr(command, "commands"):
            options = {option for parameter in command.params for option in parameter.opts}
            assert {"--json", "--debug"} <= options, words


@pytest.mark.parametrize(
    "code",
    ["import traceforge.cli", "import traceforge.cli, sys; sys.argv = ['traceforge', 'train', '-h']; run()"],
)
def test_neither_importing_the_command_line_nor_its_help_imports_torch(code):
    program = f"""
import sys
def run():
    try:
        traceforge.cli.main()
    except SystemExit:
        pass
{code}
print([name for name in ('torch', 'transformers', 'peft', 'numpy') if name in sys.modules], file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("train",),
        ("train", "run.toml", "--misspelt"),
        ("ingest", "logs"),
        ("build", "sft", "folder", "-o", "samples", "--as", "parquet"),
        ("inspect", "samples"),
        ("inspect", "samples", "--model", "m", "--raw", "--json"),
        ("demo", "--updates", "0"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_message_and_no_traceback(monkeypatch, capsys, arguments):
    code, out, err = run_cli(monkeypatch, capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.strip()
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("logs.json: not JSON", hint="look at it"), 2),
        (StorageError("disk full"), 1),
        (DisagreementError("differs"), 3),
        (RuntimeError("boom"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_a_few_lines_with_its_exit_code(monkeypatch, capsys, error, code):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("traceforge.evidence.report.write_report", fail)
    found, out, err = run_cli(monkeypatch, capsys, "report", "runs/x")
    assert (found, out) == (code, "")
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2
    if isinstance(error, InputError):
        assert err == "error: logs.json: not JSON\n  way out: look at it\n"
    if isinstance(error, RuntimeError) and not isinstance(error, DisagreementError):
        assert "--debug" in err


def test_debug_shows_the_traceback(monkeypatch, capsys):
    code, _, err = run_cli(monkeypatch, capsys, "report", "no-such-run", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "InputError" in err


def test_json_is_one_document_on_stdout(monkeypatch, capsys):
    code, out, err = run_cli(monkeypatch, capsys, "version", "--json")
    assert (code, err) == (0, "")
    assert set(json.loads(out)) == {"version"}


def test_a_reader_that_closes_the_pipe_early_sees_no_traceback():
    program = "from traceforge.cli import main; main()"
    ended = subprocess.run(
        f"{sys.executable} -c '{program}' --help | head -c 1",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""


def test_a_character_that_the_terminal_cannot_show_ends_nothing():
    program = "import sys; from traceforge import cli; sys.argv=['traceforge','--help']; cli.main()"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
