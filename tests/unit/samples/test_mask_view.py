"""The mask view: runs of one weight whose texts joined are the whole sample, wherever the borders fall."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dataset_stubs import ByteTokenizer, sample

from traceforge.samples.mask_view import mask_segments, sample_text
from traceforge.samples.tokenizer import load_tokenizer

QWEN3 = Path(__file__).parents[2] / "data" / "tokenizers" / "qwen3"


def of_bytes(text, weights):
    return sample("x#0", [byte + 3 for byte in text.encode()], weights)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "tokenizer.json").write_bytes(lzma.decompress((QWEN3 / "tokenizer.json.xz").read_bytes()))
    shutil.copy(QWEN3 / "tokenizer_config.json", folder)
    return load_tokenizer(str(folder))


def test_neighbours_of_one_weight_are_one_run() -> None:
    assert mask_segments(of_bytes("abcdef", [0, 0, 1, 1, 2, 0]), ByteTokenizer()) == [
        {"text": "ab", "trained": False, "weight": 0.0},
        {"text": "cd", "trained": True, "weight": 1.0},
        {"text": "e", "trained": True, "weight": 2.0},
        {"text": "f", "trained": False, "weight": 0.0},
    ]


def test_a_character_across_a_border_stands_whole_in_the_later_run() -> None:
    # "é" is two bytes, the border falls between them.
    segments = mask_segments(of_bytes("aéb", [0, 0, 1, 1]), ByteTokenizer())
    assert [segment["text"] for segment in segments] == ["a", "éb"]


def test_a_trained_run_inside_one_character_does_not_vanish() -> None:
    segments = mask_segments(of_bytes("🙂", [0, 1, 1, 0]), ByteTokenizer())
    assert [(segment["text"], segment["trained"]) for segment in segments] == [("", True), ("🙂", False)]


def test_bytes_that_are_no_text_are_shown_as_replacements_once() -> None:
    broken = sample("x#0", [ord("a") + 3, 0xE2 + 3, ord("b") + 3], [0, 1, 1])
    segments = mask_segments(broken, ByteTokenizer())
    assert "".join(segment["text"] for segment in segments) == "a�b"


@given(st.data(), st.text(min_size=1, max_size=12))
def test_the_runs_joined_are_the_text(data, text) -> None:
    num_bytes = len(text.encode())
    weights = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=num_bytes, max_size=num_bytes))
    one = of_bytes(text, weights)
    assert "".join(segment["text"] for segment in mask_segments(one, ByteTokenizer())) == text


def test_a_real_byte_level_tokenizer_gives_no_replacement_character_at_any_border(qwen3) -> None:
    text = "<|im_start|>user\n größe 👩‍💻 𒀭 日本<|im_end|>\n"
    token_ids = qwen3.encode(text, add_special_tokens=False)
    assert any("�" in qwen3.decode([token]) for token in token_ids), "the text must split inside a character"
    for border in range(1, len(token_ids)):
        one = sample("x#0", token_ids, [0] * border + [1] * (len(token_ids) - border))
        segments = mask_segments(one, qwen3)
        assert "".join(segment["text"] for segment in segments) == text == sample_text(one, qwen3)
        assert not any("�" in segment["text"] for segment in segments)
        assert segments[-1]["trained"]
