"""Bytes to JSON values of valid Unicode text, or a refusal that says what is wrong with them.

Fast     msgspec parses nearly everything; it keeps integers of any size and copies the input only once.
Repair   A JSON escape of half a surrogate pair ("\\ud83d" alone) becomes U+FFFD, since no UTF-8 can hold it; pairs
         become their character. Repairs are counted.
Fallback NaN, Infinity and numbers out of range are read by the standard library, which accepts them.
Never    guesses an encoding: bytes that are not UTF-8 are refused.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, NamedTuple

import msgspec

from traceforge.trajectories.refusals import Refused

UTF8_BOM = b"\xef\xbb\xbf"

_decoder = msgspec.json.Decoder()

_OTHER_UNICODE = {
    b"\xff\xfe\x00\x00": "UTF-32-LE",
    b"\x00\x00\xfe\xff": "UTF-32-BE",
    b"\xff\xfe": "UTF-16-LE",
    b"\xfe\xff": "UTF-16-BE",
}
_ARCHIVES = {
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PAR1": "Parquet",
    b"SQLite format 3\x00": "an SQLite database",
}

# One surrogate escape, with a second one if it follows at once; an even number of backslashes before it are escaped
# backslashes, so the lookbehind and the pairs keep `\\ud83d` (a backslash and the letters) as it is.
_SURROGATE_ESCAPE = re.compile(
    rb"(?<!\\)(?P<before>(?:\\\\)*)\\u(?P<first>[dD][89a-fA-F][0-9a-fA-F]{2})(?:\\u(?P<second>[dD][c-fC-F][0-9a-fA-F]{2}))?"
)


_CUT_NUMBER = re.compile(r"invalid number \(byte (\d+)\)")
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")


class Parsed(NamedTuple):
    """A JSON value, and how many lone surrogates in it became U+FFFD."""

    value: Any
    replaced_surrogates: int


def parse_json(raw: bytes) -> Parsed:
    """Return the JSON value in `raw`.

    Raises:
        Refused: `not_utf8`, `truncated_json`, `invalid_json` or `too_deeply_nested`.
    """
    try:
        return Parsed(_decoder.decode(raw), 0)
    except (msgspec.DecodeError, RecursionError):
        return _parse_slowly(raw)


def _parse_slowly(raw: bytes) -> Parsed:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("not_utf8", f"byte {error.start} ({raw[error.start]:#04x}) is not UTF-8") from error
    repaired, num_replaced = repair_surrogates(raw)
    if num_replaced:
        text = repaired.decode("utf-8")
    ends_early = False
    try:
        return Parsed(_decoder.decode(repaired), num_replaced)
    except msgspec.DecodeError as error:
        cut_number = _CUT_NUMBER.search(str(error))
        ends_early = "truncated" in str(error)
        ends_early |= cut_number is not None and int(cut_number[1]) >= len(repaired.rstrip())
    except RecursionError as error:
        raise Refused("too_deeply_nested", "arrays and objects are nested too deeply") from error
    try:
        return Parsed(json.loads(text), num_replaced)
    except RecursionError as error:
        raise Refused("too_deeply_nested", "arrays and objects are nested too deeply") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}" if "\n" in text.strip() else f"character {error.pos}"
        if ends_early or error.pos >= len(text.rstrip()):
            raise Refused("truncated_json", f"the JSON ends in the middle of a value ({where})") from error
        raise Refused("invalid_json", f"{error.msg} at {where}") from error
    except ValueError as error:
        raise Refused("invalid_json", str(error)) from error


def repair_surrogates(raw: bytes) -> tuple[bytes, int]:
    r"""Return JSON text with each escape of a lone surrogate as `\ufffd`, and how many there were."""
    num_replaced = 0

    def replacement(match: re.Match[bytes]) -> bytes:
        nonlocal num_replaced
        second = match["second"]
        if match["first"][1:2] in b"89abAB" and second is not None:
            return match[0]
        num_lone = 1 if second is None else 2
        num_replaced += num_lone
        return match["before"] + rb"\ufffd" * num_lone

    repaired = _SURROGATE_ESCAPE.sub(replacement, raw)
    return repaired, num_replaced


def kind_of(value: object) -> str:
    """Return the JSON word for a value's type."""
    words = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else words.get(type(value), type(value).__name__)


def describe(value: object) -> str:
    """Return what an unknown value looks like, for a refusal: an object by its first keys, a list by its first item."""
    if isinstance(value, dict) and value:
        return "an object with the keys " + ", ".join(str(key)[:40] for key in list(value)[:8])
    if isinstance(value, list) and value:
        first = value[0]
        return f"a list that begins with {kind_of(first) if isinstance(first, list) else describe(first)}"
    return f"an empty {kind_of(value).split()[-1]}" if isinstance(value, (dict, list)) else kind_of(value)


def check_encoding(head: bytes) -> None:
    """Refuse a file that is not UTF-8 text by its first bytes.

    Raises:
        Refused: `not_utf8` for other Unicode encodings, `binary_file` for archives and bytes no text holds.
    """
    for mark, name in _OTHER_UNICODE.items():
        if head.startswith(mark):
            raise Refused("not_utf8", f"the byte order mark says {name}; convert it: `iconv -f {name} -t UTF-8 FILE`")
    for mark, name in _ARCHIVES.items():
        if head.startswith(mark):
            raise Refused("binary_file", f"this is {name}")
    if b"\0" not in head:
        return
    probable = _utf16_without_mark(head)
    if probable is not None:
        way = f"`iconv -f {probable} -t UTF-8 FILE`"
        raise Refused("not_utf8", f"every other byte is zero, so it is probably {probable}; convert it: {way}")
    raise Refused("binary_file", f"zero byte at offset {head.index(0)}")


def verdict_on_text(head: bytes) -> Refused:
    """Return what to say of a file that is no JSON, by its first bytes: another encoding, not text, or not known."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        if _CONTROL.search(head):
            return Refused("binary_file", f"byte {error.start} is no text")
        return Refused("not_utf8", f"byte {error.start} ({head[error.start]:#04x}) is not UTF-8")
    return Refused("unknown_format", "text that is not JSON")


def _utf16_without_mark(head: bytes) -> str | None:
    # JSON is mostly ASCII, which UTF-16 writes as one zero byte and the letter, or the letter and one zero byte.
    even, odd = head[0:256:2], head[1:256:2]
    if odd and odd.count(0) > 0.7 * len(odd) and even.count(0) < 0.1 * len(even):
        return "UTF-16-LE"
    if even.count(0) > 0.7 * len(even) and odd.count(0) < 0.1 * len(odd):
        return "UTF-16-BE"
    return None
