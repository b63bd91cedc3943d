"""Tokens of a whole text, found part by part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures_tokenizers import CHATML, sentencepiece_like_tokenizer, tiny_tokenizer

from traceforge.samples.encoding import TextEncoder

TOKENIZERS: dict[str, Any] = {
    "byte-level": tiny_tokenizer(CHATML),
    "metaspace": sentencepiece_like_tokenizer(CHATML, prepend="first"),
    "legacy llama": sentencepiece_like_tokenizer(CHATML, prepend="normalizer"),
}
PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "</s>",
    "<s>",
    "[INST]",
    "\n",
    " ",
    "Yes",
    " the file",
    "é",
    "\U0001f44d",
    "<|im_",
]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=25))
def test_ids_and_offsets_of_parts_are_those_of_the_whole_text(name: str, pieces: list[str]) -> None:
    encoder, text = TextEncoder(TOKENIZERS[name]), "".join(pieces)
    assert encoder.splits_at_special_tokens
    whole, parts = encoder.encode_whole([text])[0], encoder.encode(text)
    for one, other in zip(whole, parts, strict=True):
        assert one.tolist() == other.tolist()


def test_a_tokenizer_whose_parts_do_not_add_up_is_given_whole_texts() -> None:
    class CutsInsideWords(TextEncoder):
        def _parts(self, text: str) -> list[str]:
            return [text[: len(text) // 2], text[len(text) // 2 :]]

    encoder = CutsInsideWords(TOKENIZERS["metaspace"])
    assert not encoder.splits_at_special_tokens
    ids = TOKENIZERS["metaspace"]("Yes please look", add_special_tokens=False)["input_ids"]
    assert encoder.encode("Yes please look").ids.tolist() == ids


def test_parts_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceforge.samples.encoding._REMEMBERED_CHARS", 50)
    encoder = TextEncoder(TOKENIZERS["byte-level"])
    for number in range(20):
        text = f"<|im_start|>Yes {number}<|im_end|>" * 3
        assert np.array_equal(encoder.encode(text).ids, encoder.encode_whole([text])[0].ids)
        assert encoder._remembered_chars < 150


def test_the_final_special_token_is_found_behind_white_space_only() -> None:
    encoder = TextEncoder(TOKENIZERS["byte-level"])
    assert encoder.final_special("a<|im_end|>\n\n") == (1, 11)
    assert encoder.final_special("a<|im_end|>b") is None
    assert encoder.final_special("") is None
