"""Bytes to JSON values: surrogates, numbers, nesting, encodings."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceforge.trajectories.refusals import Refused
from traceforge.trajectories.text import check_encoding, describe, parse_json, repair_surrogates


def reason_for(raw: bytes) -> str:
    with pytest.raises(Refused) as caught:
        parse_json(raw)
    return caught.value.reason


@pytest.mark.parametrize(
    ("raw", "text", "num_replaced"),
    [
        (rb'"\ud83d"', "�", 1),
        (rb'"\ud83d\udc4d"', "\N{THUMBS UP SIGN}", 0),
        (rb'"\udc4d\ud83d"', "��", 2),
        (rb'"\udc4d\udc4d"', "��", 2),
        (rb'"\ud83d\ud83d\udc4d"', "�\N{THUMBS UP SIGN}", 1),
        (rb'"\ud83d\udc4d\udc4d"', "\N{THUMBS UP SIGN}�", 1),
        (rb'"\ud83d \udc4d"', "� �", 2),
        (rb'"\\ud83d"', r"\ud83d", 0),
        (rb'"\\\ud83d"', "\\�", 1),
        (rb'"\\\\ud83d \ud83d"', "\\\\ud83d �", 1),
        (rb'"\uD83D\n"', "�\n", 1),
        (rb'"\ud83dx\u0041"', "�xA", 1),
    ],
)
def test_half_a_surrogate_pair_becomes_the_replacement_character(raw: bytes, text: str, num_replaced: int) -> None:
    assert parse_json(raw) == (text, num_replaced)


@given(st.text(st.sampled_from('\ud83d\udc4d\\udn\n"é'), max_size=12))
def test_repair_agrees_with_the_standard_library_and_a_plain_replacement(text: str) -> None:
    # The oracle: let Python read the escapes, join what makes a pair, and replace what is left over.
    escaped = json.dumps(text)
    joined = json.loads(escaped).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    value, num_replaced = parse_json(escaped.encode())
    assert value == joined
    assert num_replaced == sum("\ud800" <= char <= "\udfff" for char in json.loads(escaped))


def test_text_without_lone_surrogates_keeps_its_bytes() -> None:
    raw = rb'{"a": "\ud83d\udc4d \\ud83d \\\\", "b": "\u00e9"}'
    assert repair_surrogates(raw) == (raw, 0)


def test_numbers_no_json_has_are_read_and_big_integers_stay_exact() -> None:
    value = parse_json(b'{"cost": NaN, "limit": -Infinity, "big": 1e999, "id": 123456789012345678901234567890}').value
    assert value["cost"] != value["cost"]
    assert value["limit"] == float("-inf")
    assert value["id"] == 123456789012345678901234567890


@pytest.mark.parametrize(
    "raw", [b'{"a": [1, 2', b'{"a": "text', b'{"a":', b'{"a": tru', b"[1.", rb'{"a": "\u12', b'["\\']
)
def test_json_that_ends_early_is_called_truncated(raw: bytes) -> None:
    assert reason_for(raw) == "truncated_json"


@pytest.mark.parametrize(
    "raw", [b'{"a" 1}', b"{'a': 1}", b'{"a": 1} x', b"nonsense", b'["a\tb"]', b"[" + b"9" * 5000 + b"]x"]
)
def test_json_that_is_wrong_is_called_invalid(raw: bytes) -> None:
    assert reason_for(raw) == "invalid_json"


def test_nesting_beyond_the_parsers_is_a_refusal() -> None:
    for depth in (1_100, 5_000, 200_000):
        assert reason_for(b"[" * depth + b"]" * depth) == "too_deeply_nested"


@pytest.mark.parametrize("raw", ['{"a": "é"}'.encode("latin-1"), b'{"a": "\xed\xa0\x80"}', b'{"\xff": 1}'])
def test_bytes_that_are_not_utf8_are_refused_and_never_guessed(raw: bytes) -> None:
    assert reason_for(raw) == "not_utf8"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_and_utf32_are_named_with_the_way_out(encoding: str) -> None:
    with pytest.raises(Refused, match=r"UTF-(16|32)") as caught:
        check_encoding(json.dumps({"messages": []}).encode(encoding))
    assert caught.value.reason == "not_utf8"
    assert "iconv" in caught.value.detail


@pytest.mark.parametrize("head", [b"PK\x03\x04 zip", b"\x1f\x8b\x08 gzip", b"PAR1", b"\x7fELF\x02\x00\x01"])
def test_archives_and_binaries_are_told_by_their_first_bytes(head: bytes) -> None:
    with pytest.raises(Refused) as caught:
        check_encoding(head)
    assert caught.value.reason == "binary_file"


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_that_utf8_holds_or_a_refusal(raw: bytes) -> None:
    with contextlib.suppress(Refused):
        json.dumps(parse_json(raw).value, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "an empty object"),
        ([], "an empty list"),
        ([{"a": 1}], "a list that begins with an object with the keys a"),
        (3, "a number"),
    ],
)
def test_an_unknown_value_is_described(value: object, words: str) -> None:
    assert describe(value) == words
