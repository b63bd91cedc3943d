"""Mask views: nothing vanishes without its number of characters in its place."""

from __future__ import annotations

from typing import Any

from traceforge.evidence.masks import MaskView, mask_views


def view(*segments: tuple[str, bool]) -> MaskView:
    sample: dict[str, Any] = {
        "sample_id": "a#0",
        "set": "train",
        "num_tokens": 10,
        "trained_tokens": 4,
        "segments": [{"text": text, "trained": trained, "weight": float(trained)} for text, trained in segments],
    }
    return mask_views([sample])[0]


def characters(mask: MaskView) -> int:
    return sum(len(piece.text) + piece.left_out for piece in (*mask.folded, *mask.shown))


def test_a_short_sample_is_shown_whole() -> None:
    found = view(("prompt\n", False), ("answer", True))
    assert found.folded == ()
    assert [(piece.text, piece.trained) for piece in found.shown] == [("prompt\n", False), ("answer", True)]
    assert found.trained_share == 0.4


def test_a_long_prompt_folds_at_a_line_and_keeps_its_end_in_sight() -> None:
    prompt = "".join(f"line {number}\n" for number in range(1000))
    found = view((prompt, False), ("answer", True))
    assert found.folded[0].text + found.shown[0].text == prompt
    assert found.shown[0].text.startswith("line ")
    assert len(found.shown[0].text) <= 240
    assert found.folded_characters == len(found.folded[0].text)


def test_a_sample_that_starts_trained_is_not_folded() -> None:
    assert view(("x" * 5000, True), ("y", False)).folded == ()


def test_a_huge_observation_is_cut_in_its_middle_and_every_character_is_accounted_for() -> None:
    observation = "head" + "x" * 3_000_000 + "tail"
    found = view(("prompt", False), ("call", True), (observation, False), ("answer", True))
    assert characters(found) == len("prompt" + "call" + observation + "answer")
    texts = [piece.text for piece in found.shown]
    assert "answer" in texts
    assert any(text.startswith("head") for text in texts)
    assert any(text.endswith("tail") for text in texts)
    assert sum(map(len, texts)) < 25_000


def test_thousands_of_segments_are_bounded_too() -> None:
    found = view(*[("ab", bool(number % 2)) for number in range(50_000)])
    assert len(found.shown) <= 401
    assert characters(found) == 100_000


def test_control_characters_become_visible_and_a_missing_field_is_none() -> None:
    found = mask_views([{"segments": [{"text": "\x1b[31mred\x00\r\n\t", "trained": True}]}])[0]
    assert found.shown[0].text == "␛[31mred␀␍\n\t"
    assert (found.num_tokens, found.trained_share) == (None, None)
