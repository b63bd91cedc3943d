"""Which files the inputs name, and the JSON values in each, one at a time.

Inputs   A file, a folder (everything below it, in sorted order, hidden names left out and counted) or a glob.
Layout   Told from the content. A file whose first line is a JSON value of its own, with more lines after it, is a file
         of lines, and a bad line there is its own refusal. Everything else is one document.
Memory   A file of lines is held a line at a time; a document, like a file of one long line, is held once.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from traceforge.errors import InputError
from traceforge.trajectories.refusals import Refusal, Refused
from traceforge.trajectories.text import UTF8_BOM, check_encoding, describe, parse_json, verdict_on_text

_NUM_LINES_LOOKED_AT = 20
_HEAD_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20
_LINE_SUFFIXES = (".jsonl", ".ndjson")


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text that every encoder takes; bytes of a name that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", "replace")


@dataclass
class Discovery:
    """The files that inputs name, each once, and what was passed over.

    Args:
        files: in the order of the inputs, a folder's in sorted order.
        refusals: links in a loop, folders that cannot be listed, things that are not files.
        num_hidden: files and folders below a given folder whose name begins with a dot.
        num_repeated: files reached more than once, read once.
    """

    files: list[Path] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    num_hidden: int = 0
    num_repeated: int = 0
    _seen: set[str] = field(default_factory=set)

    def add_input(self, given: str, excluded: frozenset[str]) -> None:
        """Add the files of one input.

        Args:
            given: a file, a folder or a glob.
            excluded: real paths that are never read: the output of this very ingest.

        Raises:
            InputError: it names no file.
        """
        before = len(self.files) + len(self.refusals) + self.num_repeated
        matches = [given] if os.path.lexists(given) else sorted(glob.glob(given, recursive=True))
        for path in matches:
            if os.path.isdir(path):
                self._add_folder(path, excluded, above=())
            else:
                self._add_file(path, excluded)
        if len(self.files) + len(self.refusals) + self.num_repeated == before:
            raise InputError(
                f"{shown_path(given)}: {_why_nothing(given)}",
                hint="pass files, folders or quoted globs that hold agent logs",
            )

    def _add_folder(self, folder: str, excluded: frozenset[str], above: tuple[str, ...]) -> None:
        real = os.path.realpath(folder)
        if real in above:
            self._refuse(folder, "symlink_loop", "this folder is a link to a folder above it")
            return
        try:
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            self._refuse(folder, "unreadable", error.strerror or str(error))
            return
        for entry in entries:
            if entry.name.startswith("."):
                self.num_hidden += 1
            elif _is_folder(entry):
                self._add_folder(entry.path, excluded, above=(*above, real))
            else:
                self._add_file(entry.path, excluded, real=None if entry.is_symlink() else f"{real}/{entry.name}")

    def _add_file(self, path: str, excluded: frozenset[str], *, real: str | None = None) -> None:
        real = os.path.realpath(path) if real is None else real
        if real in excluded:
            return
        if real in self._seen:
            self.num_repeated += 1
            return
        self._seen.add(real)
        try:
            is_regular = stat.S_ISREG(os.stat(path).st_mode)
        except OSError as error:
            reason = "symlink_loop" if error.errno == errno.ELOOP else "unreadable"
            self._refuse(path, reason, error.strerror or str(error))
            return
        if is_regular:
            self.files.append(Path(path))
        else:
            self._refuse(path, "not_a_file", "a device, a pipe or a socket")

    def _refuse(self, path: str, reason: str, detail: str) -> None:
        self.refusals.append(Refusal(file=shown_path(path), line=None, reason=reason, detail=detail))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # A link to itself: whatever is wrong with it, reading it as a file tells.
        return False


def _why_nothing(path: str) -> str:
    if os.path.isdir(path):
        return "no file to read in this folder"
    return "the output of this very command" if os.path.exists(path) else "no such file, and no file matches it"


def discover(inputs: Iterable[str], excluded: Iterable[Path] = ()) -> Discovery:
    """Return the files that the inputs name.

    Raises:
        InputError: an input names no file.
    """
    real = frozenset(os.path.realpath(path) for path in excluded)
    discovery = Discovery()
    for given in inputs:
        discovery.add_input(given, real)
    return discovery


@dataclass(frozen=True, slots=True)
class Read:
    """One JSON value of a file, or why it could not be read.

    Args:
        line: its line from 1; None where the file is one document.
        value: the parsed value; meaningless where `refused` is set.
        refused: the verdict on this line or document.
        replaced_surrogates: how many characters were repaired in it.
    """

    line: int | None
    value: Any = None
    refused: Refused | None = None
    replaced_surrogates: int = 0


class InputFile:
    """An open file whose size and sha256 are taken while its values are read."""

    def __init__(self, handle: BinaryIO, path: Path) -> None:
        self._handle = handle
        # Whether a lone line is a document or a file of one line, nobody can tell from the content.
        self._lone_line = 1 if path.suffix.lower() in _LINE_SUFFIXES else None
        self._head = b""
        self._rewind()

    def values(self, is_known: Callable[[Any], bool]) -> Iterator[Read]:
        """Yield the file's JSON values in order.

        Args:
            is_known: whether a value is of a known kind. If none of the first lines is, the file is refused once and
                not line by line.

        Raises:
            Refused: the verdict on the whole file.
        """
        self._check_head()
        first, second = self._next_line(), self._next_line()
        if first is None:
            raise Refused("empty_file", "nothing but white space" if self.num_bytes else "0 bytes")
        if second is None:
            read = _read(self._lone_line, first[1])
            del first  # Raw lines may be many megabytes: none is held while its value is used.
            yield read
            return
        begin = _read(*first) if _may_be_record(first[1]) else None
        ahead = [first, second]
        del first, second
        if begin is None or not _is_known(begin, is_known):
            yield from self._odd_beginning(ahead, begin, is_known)
            return
        del ahead[0]
        yield begin
        del begin
        yield from self._remaining_lines(ahead)

    def _odd_beginning(
        self, ahead: list[tuple[int, bytes]], begin: Read | None, is_known: Callable[[Any], bool]
    ) -> Iterator[Read]:
        # The first line is no record: this is a document over several lines, a file of lines with a bad first one, or
        # nothing known. A record on a line of its own soon after it tells.
        found = _holds_record(ahead[1][1], is_known)
        while not found and len(ahead) < _NUM_LINES_LOOKED_AT and (line := self._next_line()) is not None:
            ahead.append(line)
            found = _holds_record(line[1], is_known)
        opening = ahead[0][1].lstrip()[:1]
        is_value = begin is not None and begin.refused is None
        if not is_value and opening in (b"{", b"[") and not (found and opening == b"{"):
            # A list with one record a line ends in a line that is a record alone, so a list is tried whole first.
            document = self._document()
            if document.refused is None or not found:
                yield document
                return
            self._rewind()
            ahead = []
        elif not found:
            if begin is None or begin.refused is not None:
                raise verdict_on_text(self._head)
            seen = describe(begin.value)
            raise Refused("unknown_format", f"none of the first lines is of a known format; the first is {seen}")
        yield from self._remaining_lines(ahead)

    def _remaining_lines(self, ahead: list[tuple[int, bytes]]) -> Iterator[Read]:
        ahead.reverse()
        while (line := ahead.pop() if ahead else self._next_line()) is not None:
            read, line = _read(*line), None
            yield read
            del read

    def finish(self) -> str:
        """Read what is left and return the hex sha256 of the whole file."""
        while chunk := self._handle.read(_CHUNK_BYTES):
            self._count(chunk)
        return self._hash.hexdigest()

    def _check_head(self) -> None:
        self._head = self._handle.read(_HEAD_BYTES)
        self._handle.seek(0)
        check_encoding(self._head)
        text = self._head.removeprefix(UTF8_BOM).lstrip()
        if text and text[:1] not in (b"{", b"[") and b"\n" not in text:
            raise verdict_on_text(self._head)  # Without a line end in sight, the whole file could be one line.

    def _rewind(self) -> None:
        self._handle.seek(0)
        self._hash = hashlib.sha256()
        self._line = 0
        self.num_bytes = 0

    def _count(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self.num_bytes += len(chunk)

    def _next_line(self) -> tuple[int, bytes] | None:
        while line := self._handle.readline():
            self._count(line)
            self._line += 1
            if self._line == 1:
                line = line.removeprefix(UTF8_BOM)
            if line and not line.isspace():
                return self._line, line
        return None

    def _document(self) -> Read:
        self._rewind()
        whole = self._handle.read()
        self._count(whole)
        return _read(None, whole.removeprefix(UTF8_BOM))


def _read(line: int | None, raw: bytes) -> Read:
    try:
        value, replaced = parse_json(raw)
    except Refused as refused:
        return Read(line=line, refused=refused)
    return Read(line=line, value=value, replaced_surrogates=replaced)


def _may_be_record(raw: bytes) -> bool:
    # Cheaper than parsing, and it spares the lines of an indented document.
    return raw[:64].lstrip()[:1] in (b"{", b"[") and raw[-64:].rstrip()[-1:] in (b"}", b"]")


def _holds_record(raw: bytes, is_known: Callable[[Any], bool]) -> bool:
    return _may_be_record(raw) and _is_known(_read(None, raw), is_known)


def _is_known(read: Read, is_known: Callable[[Any], bool]) -> bool:
    return read.refused is None and is_known(read.value)
