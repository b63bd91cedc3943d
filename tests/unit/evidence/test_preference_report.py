"""The preference section of the report: numbers before and after, and the plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traceforge.evidence.report import render
from traceforge.evidence.run_record import load_run

UPDATE = {
    "micro_batches": 1,
    "samples": 2,
    "trained_tokens": 60,
    "row_tokens": 900,
    "learning_rate": 1e-5,
    "gradient_norm": 0.7,
    "seconds": 2.0,
    "tokens_per_s": 450.0,
    "peak_bytes": 10**9,
    "skipped": False,
}


def preference(accuracy: float, margin: float, chosen: float, rejected: float) -> dict[str, float]:
    return {
        "accuracy": accuracy,
        "margin": margin,
        "chosen_logp": chosen,
        "rejected_logp": rejected,
        "chosen_length": 31.5,
        "rejected_length": 28.0,
        "chosen_reward": 2 * chosen,
        "rejected_reward": 2 * rejected,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    updates = [
        {**UPDATE, "update": n, "loss": 0.9 - n / 10, **preference(0.5, n / 10, -1.5, -1.4 - n / 10)} for n in (1, 2, 3)
    ]
    evaluations = [
        {
            "update": update,
            "set": name,
            "loss": 0.9,
            "trained_tokens": 60,
            "rows": 4,
            "rows_without_targets": 0,
            **preference(*numbers),
        }
        for update, numbers in ((0, (0.25, -0.125, -1.75, -1.625)), (3, (0.75, 0.375, -1.5, -1.875)))
        for name in ("train", "evaluation")
    ]
    for name, lines in (("updates.jsonl", updates), ("evaluations.jsonl", evaluations)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_it_shows_accuracy_margin_and_both_sides_before_and_after(folder):
    page = render(load_run(folder))
    section = page[page.index('<section id="preference">') : page.index('<section id="updates">')]
    for shown in (
        "25%",
        "75%",
        "-0.125",
        "0.375",
        "-1.75",
        "-1.875",
        "31.5",
        '<td class="number">0</td>',
        '<td class="number">3</td>',
    ):
        assert shown in section, shown
    assert section.count("<svg") >= 3
    assert "nats per pair" in page
    assert "Perplexity" not in page
    assert "var(--chart-chosen)" in section
    assert "var(--chart-rejected)" in section


def test_another_margin_draws_another_plot(folder):
    before = render(load_run(folder))
    lines = (folder / "updates.jsonl").read_text().replace('"margin": 0.2', '"margin": 0.25')
    (folder / "updates.jsonl").write_text(lines)
    assert render(load_run(folder)) != before


def test_a_supervised_run_has_no_such_section(folder):
    for name in ("updates.jsonl", "evaluations.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        plain = [{k: v for k, v in line.items() if k not in preference(0, 0, 0, 0)} for line in lines]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in plain))
    page = render(load_run(folder))
    assert 'id="preference"' not in page
    assert "nats per pair" not in page
