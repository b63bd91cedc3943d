"""`traceforge build pairs` and `inspect` on a command line: what is printed, and the exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from traceforge.cli import main

DATA = Path(__file__).parents[2] / "data" / "pairs"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["traceforge", *(str(each) for each in arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_rows_are_built_and_what_was_refused_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "build", "pairs", DATA / "hostile.jsonl", "-o", tmp_path / "out") == 0
    out = capsys.readouterr().out
    assert "1 pairs of 1 tasks in 1 groups, of 23 looked at" in out
    assert "no_common_beginning: hostile.jsonl:6: " in out


def test_one_document_has_all_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "build", "pairs", DATA / "trl.jsonl", "-o", tmp_path / "out", "--as", "trl", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["pairs"], document["trl_rows"], document["refusals"]) == (4, 4, {})


def test_synthetic_pairs_need_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--prompt-tokens", 30, "--reply-tokens", 5)
    assert run(monkeypatch, "build", "pairs", "--synthetic", 3, *lengths, "-o", tmp_path / "out") == 0
    assert "3 synthetic pairs of 3 tasks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "build pairs needs ROWS, or --synthetic N"),
        (["{rows}", "--synthetic", "2"], "build pairs needs ROWS, or --synthetic N"),
        (["{rows}", "--as", "csv"], "the only other form is trl"),
        (["{rows}", "--model", "m"], "--model is for --synthetic"),
        (["--synthetic", "2", "--pair", "a|b"], "not for --synthetic"),
        (["missing.jsonl"], "missing.jsonl: cannot read rows"),
        (["{data}"], "which of its trajectories are pairs must be said"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_names_the_way_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    given = [each.format(rows=DATA / "trl.jsonl", data=DATA) for each in arguments]
    assert run(monkeypatch, "build", "pairs", *given, "-o", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
