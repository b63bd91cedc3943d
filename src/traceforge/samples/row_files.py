"""Row files: instruction rows and prompt-completion rows in `.jsonl` and `.json` files, parsed and checked.

Forms    `instruction, input, output` (input may be empty or missing); `prompt, completion` as two strings;
         `prompt, completion, tools` as two lists of messages and a list of schemas (conversational).
Ids      `{file stem or data set id}#{row}`, rows counted from 0. They do not depend on selection or order.
Not here Tokens and selection: see `row_samples.py`. Hub data sets: see `hub_rows.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import orjson

from traceforge.errors import InputError

RowForm = Literal["instruction", "prompt_completion", "conversation"]

_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class RowFile:
    """The rows of one source, parsed and of one form.

    Args:
        name: file stem or data set id: the head of every row id.
        origin: what errors call it; with `lines`, the line of each row follows.
        rows: the rows, in file order.
        form: which fields they have.
        content_hash: sha256 of the file's bytes, or of a hub data set's rows.
        lines: line number of each row in a `.jsonl`, else empty.
    """

    name: str
    origin: str
    rows: Sequence[dict[str, Any]]
    form: RowForm
    content_hash: str
    lines: Sequence[int] = ()

    def row_id(self, index: int) -> str:
        """Return the id of row `index`."""
        return f"{self.name}#{index}"

    def place(self, index: int) -> str:
        """Return where row `index` stands, for an error message."""
        return f"{self.origin}:{self.lines[index]}" if self.lines else f"{self.origin}: row {index}"


def read_row_file(path: Path) -> RowFile:
    """Return the rows of a `.jsonl` (one object a line) or `.json` (one list of objects) file.

    Raises:
        InputError: the file cannot be read, is no UTF-8 JSON, is empty, or a row is of no known or of another form.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read rows: {error.strerror}") from error
    rows, lines = _parse_list(path, content) if path.suffix == ".json" else _parse_lines(path, content)
    digest = hashlib.sha256(content).hexdigest()
    return checked_rows(path.stem, str(path), rows, content_hash=digest, lines=lines)


def checked_rows(
    name: str, origin: str, rows: Sequence[Any], *, content_hash: str, lines: Sequence[int] = ()
) -> RowFile:
    """Return the rows as a `RowFile` after checking that all are of the first row's form.

    Raises:
        InputError: there is no row, or one is of no known or of another form; the message names it.
    """
    if not rows:
        raise InputError(f"{origin}: holds no row")
    unnamed = RowFile(name, origin, rows, "instruction", content_hash, lines)
    forms = [_form(row, unnamed.place(index)) for index, row in enumerate(rows)]
    for index, form in enumerate(forms):
        if form != forms[0]:
            raise InputError(
                f"{unnamed.place(index)}: a {form} row in a file of {forms[0]} rows", hint="use one file for each form"
            )
    return replace(unnamed, form=forms[0])


def _form(row: Any, place: str) -> RowForm:
    if not isinstance(row, dict):
        raise InputError(f"{place}: a row must be a JSON object, this is a {type(row).__name__}")
    if "instruction" in row and "output" in row:
        for name in ("instruction", "input", "output"):
            if not isinstance(row.get(name, ""), str) and not (name == "input" and row[name] is None):
                raise InputError(f"{place}: field {name!r} must be text, it is a {type(row[name]).__name__}")
        return "instruction"
    if "prompt" in row and "completion" in row:
        sides = (row["prompt"], row["completion"])
        if all(isinstance(side, str) for side in sides):
            return "prompt_completion"
        if all(isinstance(side, list) for side in sides):
            return "conversation"
        raise InputError(f"{place}: prompt and completion must both be text or both be lists of messages")
    raise InputError(f"{place}: a row with the fields {', '.join(map(repr, row)) or 'none'}", hint=_way_out(row))


def _way_out(row: dict[str, Any]) -> str:
    if "messages" in row or ("trajectory_id" in row and "sample_id" not in row):
        return "these are conversations: `traceforge ingest` them, then `traceforge build sft`, and pass that folder"
    if "sample_id" in row:
        return "this is a file of a built data set: pass its folder"
    return "rows need instruction and output (input may be left out), or prompt and completion"


def _parse_list(path: Path, content: bytes) -> tuple[list[Any], list[int]]:
    rows = _parse(content, str(path))
    if not isinstance(rows, list):
        raise InputError(f"{path}: a .json file of rows holds one list", hint="one object a line is a .jsonl file")
    return rows, []


def _parse_lines(path: Path, content: bytes) -> tuple[list[Any], list[int]]:
    rows: list[Any] = []
    lines: list[int] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            rows.append(_parse(line, f"{path}:{number}"))
            lines.append(number)
    return rows, lines


def _parse(content: bytes, place: str) -> Any:
    content = content.removeprefix(b"\xef\xbb\xbf")
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as first:
        try:
            # orjson refuses NaN, lone surrogates and deep nesting; what the standard library reads is kept.
            text = content.decode("utf-8")
            return _without_surrogates(json.loads(text))
        except UnicodeDecodeError as error:
            raise InputError(f"{place}: not UTF-8 text: {error.reason} at byte {error.start}") from error
        except (ValueError, RecursionError):
            raise InputError(f"{place}: not JSON: {first}") from first


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return value
