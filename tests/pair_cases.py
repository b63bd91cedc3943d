"""Short ways to build and load preference pairs in tests, with lengths that can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fixtures_tokenizers import CHATML, tiny_tokenizer, word_tokenizer
from traceforge.config import DataSettings
from traceforge.samples.branches import Pair
from traceforge.samples.pair_build import build_pairs
from traceforge.samples.pair_loading import PairSets, load_pairs

# One token a word, and one for the end of a turn: lengths can be counted by hand.
WORDS = ["<unk>", "</s>", *(f"w{number}" for number in range(2, 6000))]
ONE_A_WORD = word_tokenizer(
    "{% for m in messages %}{{ m.content + (' </s>' if m.role == 'assistant' else ' ') }}{% endfor %}", WORDS
)
TINY = tiny_tokenizer(CHATML)


def words(first: int, count: int) -> str:
    return " ".join(f"w{first + number}" for number in range(count))


def row(prompt: int, chosen: int, rejected: int) -> dict[str, str]:
    """Return a row of so many tokens a part; the end of a turn counts as one of the reply."""
    return {"prompt": words(2, prompt), "chosen": words(1000, chosen - 1), "rejected": words(3000, rejected - 1)}


def build(tmp_path: Path, *rows: Any, name: str = "pairs") -> str:
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    build_pairs(tmp_path / f"{name}.jsonl", tmp_path / name)
    return str(tmp_path / name)


def load(folder: str, tokenizer: Any = ONE_A_WORD, **given: Any) -> PairSets:
    fields = {"train": folder, "max_tokens": 10_000, "length_policy": "refuse", **given}
    return load_pairs(DataSettings.model_validate(fields), tokenizer)


def only(sets: PairSets) -> Pair:
    (pair,) = sets.train[0].pairs
    return pair


def trained(pair: Pair) -> tuple[int, int]:
    return sum(one.num_trained_tokens for one in pair.chosen), sum(one.num_trained_tokens for one in pair.rejected)


def two_pairs(count: int = 2) -> list[dict[str, str]]:
    return [{"prompt": f"w{number + 2}", "chosen": "w500 w501", "rejected": "w600"} for number in range(count)]


MULTI_TURN = {
    "prompt": [{"role": "user", "content": "go"}],
    "chosen": [
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "seen"},
        {"role": "assistant", "content": "two"},
    ],
    "rejected": [{"role": "assistant", "content": "stop"}],
}
