"""`inspect PAIRS --scores`: the mean log-probability of each side, against transformers on the side's own text."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = [
    {"prompt": "hello", "chosen": "hi there", "rejected": "no"},
    {"prompt": "list files", "chosen": "ls -lt", "rejected": "ls -lS *"},
]


@pytest.fixture
def pairs(tmp_path, traceforge):
    chat = [
        {name: [{"role": "user" if name == "prompt" else "assistant", "content": text}] for name, text in row.items()}
        for row in ROWS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat), encoding="utf-8")
    built = traceforge("build", "pairs", "rows.jsonl", "-o", "pairs")
    assert built.code == 0, built.err
    return tmp_path / "pairs"


def by_transformers(model_folder, prompt: str, reply: str) -> float:
    """Return the mean log-probability of the reply and of the token that ends it."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    start = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    before = tokenizer(start, add_special_tokens=False).input_ids
    ids = before + tokenizer(f"{reply}<|im_end|>", add_special_tokens=False).input_ids
    with torch.no_grad():
        logp_SV = network(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(logp_SV[at - 1, ids[at]]) for at in range(len(before), len(ids))) / (len(ids) - len(before))


def test_scores_are_those_of_transformers_on_each_side(pairs, traceforge, tiny_model):
    shown = traceforge("inspect", pairs, "--model", tiny_model, "--scores", "--json", "--set", "model.dtype=float32")
    assert shown.code == 0, shown.err
    lines = shown.json()["pairs"]
    assert len(lines) == len(ROWS)
    for line, row in zip(lines, ROWS, strict=True):
        for side in ("chosen", "rejected"):
            assert line[f"{side}_logp"] == pytest.approx(
                by_transformers(tiny_model, row["prompt"], row[side]), abs=2e-5
            )
    assert "under the model" in traceforge("inspect", pairs, "--model", tiny_model, "--scores").out


def test_scores_of_something_else_than_pairs_is_wrong_usage(traceforge, samples, tiny_model):
    shown = traceforge("inspect", samples, "--model", tiny_model, "--scores")
    assert shown.code == 2
    assert "--scores" in shown.err
    assert "build pairs" in shown.err
