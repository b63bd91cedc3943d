"""Synthetic pairs: exact lengths, the same text from the same seed, and marked for what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fixtures_tokenizers import CHATML, tiny_tokenizer

from traceforge.config import DataSettings
from traceforge.errors import InputError
from traceforge.samples.pair_loading import load_pairs
from traceforge.samples.pair_references import open_pairs
from traceforge.samples.synthetic_pairs import build_synthetic_pairs

TINY = tiny_tokenizer(CHATML)


def test_lengths_are_exact_under_a_tokenizer(tmp_path: Path, qwen3_tokenizer: Any) -> None:
    build_synthetic_pairs(tmp_path / "s", pairs=3, prompt_tokens=200, reply_tokens=33, tokenizer=qwen3_tokenizer)
    given = DataSettings.model_validate({"train": str(tmp_path / "s")})
    sets = load_pairs(given, qwen3_tokenizer)
    for pair in sets.train[0].pairs:
        for sample in pair.samples:
            trained = np.flatnonzero(sample.weights_S)
            assert trained.tolist() == list(range(200, 233))
    assert sets.statistics.sources[0].kind == "synthetic_pairs"


def test_words_count_as_tokens_without_one(tmp_path: Path) -> None:
    build_synthetic_pairs(tmp_path / "s", pairs=2, prompt_tokens=40, reply_tokens=7)
    folder = open_pairs(tmp_path / "s")
    for reference in folder.references:
        sides = folder.sides(reference)
        assert [len(side.messages[1].content.split()) for side in sides] == [7, 7]
        assert len(sides[0].messages[0].content.split()) == 40
        assert sides[0].messages[0].content.startswith("Synthetic pair ")
        assert not set(sides[0].messages[1].content.split()) & set(sides[1].messages[1].content.split())
        assert {side.source_format for side in sides} == {"synthetic"}
    assert folder.is_synthetic
    assert len({reference.task_id for reference in folder.references}) == 2


def test_the_seed_decides_the_text(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_synthetic_pairs(tmp_path / name, pairs=1, prompt_tokens=40, reply_tokens=7, seed=seed)
    bytes_of = {name: (tmp_path / name / "trajectories.jsonl").read_bytes() for name in "abc"}
    assert bytes_of["a"] == bytes_of["b"]
    assert bytes_of["a"].split() != bytes_of["c"].split()


def test_lengths_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be had exactly with this tokenizer"):
        build_synthetic_pairs(tmp_path / "s", pairs=1, prompt_tokens=16, reply_tokens=2, tokenizer=TINY)
    assert not (tmp_path / "s").exists()
    for wrong in ({"pairs": 0}, {"prompt_tokens": 15}, {"reply_tokens": 1}):
        with pytest.raises(InputError, match="synthetic pairs"):
            build_synthetic_pairs(tmp_path / "s", **{"pairs": 1, "prompt_tokens": 16, "reply_tokens": 2} | wrong)
