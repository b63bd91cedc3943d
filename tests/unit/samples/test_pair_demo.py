"""The bundled pairs are made from the bundled runs as SOURCES.md says, fit the demo's model, and can be held out."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from tests.fixtures_tokenizers import CHATML, tiny_tokenizer

import traceforge.demo
from traceforge.config import DataSettings
from traceforge.samples.pair_build import build_pairs
from traceforge.samples.pair_loading import load_pairs
from traceforge.samples.pair_references import open_pairs
from traceforge.samples.turns import fenced_command_span
from traceforge.trajectories.ingest import ingest
from traceforge.trajectories.record import Trajectory, read_trajectories

DATA = Path(traceforge.demo.__file__).parent / "data"
PAIRS = [json.loads(line) for line in (DATA / "pairs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "trajectories"
    ingest([str(DATA / "logs")], folder)
    return folder


@pytest.fixture(scope="module")
def runs(ingested: Path) -> dict[str, Trajectory]:
    return {run.trajectory_id: run for run in read_trajectories(ingested / "trajectories.jsonl")}


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_each_rejected_turn_is_made_of_the_run_as_its_note_says(number: int, runs: dict[str, Trajectory]) -> None:
    pair = PAIRS[number]
    name, _, turn = pair["chosen"].partition("#")
    turns = [runs[name].messages[index] for index in runs[name].turns()]
    source = {"no_command": int(turn), "repeats_last_turn": int(turn) - 1, "submits_at_once": -1}[pair["note"]]
    assert pair["rejected"].get("reasoning_content") == turns[source].reasoning
    text = pair["rejected"]["content"]
    if pair["note"] == "no_command":
        assert fenced_command_span(turns[source].content) is not None
        assert fenced_command_span(text) is None
        assert text == re.sub(r"\s*```bash\n.*\n```\s*$", "", turns[source].content, flags=re.DOTALL)
    else:
        assert text == turns[source].content
        assert text != turns[int(turn)].content
    if pair["note"] == "submits_at_once":
        assert "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in text


def test_all_pairs_are_built_and_a_task_can_be_held_out(ingested: Path, tmp_path: Path) -> None:
    summary = build_pairs(ingested, tmp_path / "pairs", explicit=[str(DATA / "pairs.jsonl")])
    assert (summary.pairs, summary.tasks, summary.refusals, summary.notes) == (len(PAIRS), 3, {}, {})
    given = {"train": str(tmp_path / "pairs"), "max_tokens": 50_000, "evaluation_fraction": 0.33}
    sets = load_pairs(DataSettings.model_validate(given), tiny_tokenizer(CHATML))
    assert len(sets.evaluation) + len(sets.train[0].pairs) == len(PAIRS)
    assert min(len(sets.evaluation), len(sets.train[0].pairs)) >= 3
    assert not sets.statistics.refusals
    folder = open_pairs(tmp_path / "pairs")
    chosen, rejected = folder.sides(folder.references[0])
    assert chosen.messages[: folder.references[0].prompt_messages] == rejected.messages[:-1]


def test_the_counts_of_the_notes_are_those_in_the_sources_file() -> None:
    table = dict(re.findall(r"^\| (\w+) \| (\d+) \|", (DATA / "SOURCES.md").read_text(), flags=re.MULTILINE))
    assert {name: int(count) for name, count in table.items()} == Counter(pair["note"] for pair in PAIRS)
