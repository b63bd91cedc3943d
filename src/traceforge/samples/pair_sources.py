"""Where pairs come from: a file of preference rows, or pairs named over an ingest folder; each with its place.

A row that cannot be read is a refusal with its line and never stops the rows after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from traceforge.errors import InputError
from traceforge.hashes import file_sha256
from traceforge.samples.build import check_ingest
from traceforge.samples.explicit_pairs import READ_KEYS, read_explicit_pair
from traceforge.samples.pair_rows import read_pair_row, row_format
from traceforge.samples.pair_sides import PairRefused, PairSide
from traceforge.samples.trajectory_index import TrajectoryIndex
from traceforge.trajectories.output import TRAJECTORIES
from traceforge.trajectories.readers.chat import first_name, task_of
from traceforge.trajectories.record import Trajectory
from traceforge.trajectories.refusals import Refused
from traceforge.trajectories.sources import InputFile
from traceforge.trajectories.text import describe
from traceforge.trajectories.unique_ids import UniqueIds

_ROWS_HINT = "rows need `chosen` and `rejected`, or `preferred_output` and `non_preferred_output`"
_BUFFER_BYTES = 1 << 17


class RefusedPair(msgspec.Struct, frozen=True):
    """One row or pair that is not in the build, and why. `place` is `file:line`, an item of a list, or the pair."""

    place: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class PairDraft:
    """A pair with whole records, before it is written.

    Args:
        place: where it was found.
        chosen: the side that is preferred.
        rejected: the other one.
        prompt_messages: how many leading messages are their prompt.
        group: what an update never splits with it; None is the pair itself.
        tasks: of its sides.
        states_tasks: a person or a log named them; else they are made up from the place.
    """

    place: str
    chosen: PairSide
    rejected: PairSide
    prompt_messages: int
    group: str | None
    tasks: tuple[str, ...]
    states_tasks: bool


Drafts = Iterator[PairDraft | RefusedPair]


def read_rows(path: Path, *, inputs: list[dict[str, str]], notes: Counter[str]) -> Drafts:
    """Yield the pairs of a file of preference rows.

    Args:
        path: `.jsonl`, or `.json` with one list of rows.
        inputs: gets the file's name and sha256 when it is read to its end.
        notes: counts what was repaired or left unread.

    Raises:
        InputError: the file cannot be read, or holds no preference rows.
    """
    ids = UniqueIds()
    for place, number, row in _values(path, lambda value: row_format(value) is not None, inputs, notes):
        if isinstance(row, RefusedPair):
            yield row
            continue
        if row_format(row) is None:
            yield RefusedPair(place, "bad_pair", f"no preference row: {describe(row)}")
            continue
        try:
            read = read_pair_row(row, notes)
        except PairRefused as refused:
            yield RefusedPair(place, refused.code, refused.detail)
            continue
        name = read.name if read.name is not None else f"{path.stem}:{number}"
        sides = []
        for side, messages in (("chosen", read.chosen), ("rejected", read.rejected)):
            record = Trajectory(
                trajectory_id=ids.claim(f"{name}.{side}"),
                task_id=name if read.task is None else task_of(read.task),
                source_format=read.row_format,
                source_file=path.name,
                messages=messages,
                tools=read.tools,
            )
            sides.append(PairSide(record, len(messages), is_new=True))
        yield PairDraft(
            place=place,
            chosen=sides[0],
            rejected=sides[1],
            prompt_messages=read.prompt_messages,
            group=read.group,
            tasks=(sides[0].trajectory.task_id,),
            states_tasks=read.task is not None,
        )


def read_explicit(
    source: Path, explicit: Sequence[str], *, inputs: list[dict[str, str]], notes: Counter[str]
) -> Drafts:
    """Yield pairs of ingested trajectories and turns.

    Args:
        source: a folder made by `traceforge ingest`, or a `trajectories.jsonl`.
        explicit: `A|B`, or files with one explicit pair a line.
        inputs: gets the names and hashes of all files.
        notes: counts what was repaired or left unread.

    Raises:
        InputError: the source or a file cannot be read, or one of `explicit` is neither a file nor `A|B`.
    """
    trajectories = source / TRAJECTORIES if source.is_dir() else source
    if not trajectories.is_file():
        raise InputError(
            f"{trajectories}: no such file; explicit pairs name trajectories of an ingest folder",
            hint="run `traceforge ingest LOGS -o FOLDER` first and pass FOLDER",
        )
    found_hash = file_sha256(trajectories)
    check_ingest(source, trajectories, found_hash)
    inputs.append({"file": trajectories.name, "sha256": found_hash})
    index = TrajectoryIndex(trajectories)
    ids = UniqueIds()
    for trajectory_id in index:
        ids.claim(trajectory_id)
    for given in explicit:
        path = Path(given)
        for place, number, row in _explicit_rows(given, inputs, notes):
            if isinstance(row, RefusedPair):
                yield row
                continue
            try:
                draft = _explicit_draft(row, index, ids, place=place, name=f"{path.stem}:{number}")
            except PairRefused as refused:
                yield RefusedPair(place, refused.code, refused.detail)
                continue
            for key in row.keys() - READ_KEYS:
                notes[f"unread_key:{key[:80]}"] += 1
            yield draft


def _explicit_draft(row: Any, index: TrajectoryIndex, ids: UniqueIds, *, place: str, name: str) -> PairDraft:
    if not isinstance(row, dict) or "chosen" not in row or "rejected" not in row:
        raise PairRefused("bad_pair", f"no `chosen` and `rejected`: {describe(row)}")
    chosen, rejected, prompt_messages = read_explicit_pair(row, index, name=name)
    task = first_name(row, ("task_id", "instance_id"))
    made = [_with_unique_id(side, ids) for side in (chosen, rejected)]
    named = rejected if chosen.is_new else chosen
    return PairDraft(
        place=place,
        chosen=made[0],
        rejected=made[1],
        prompt_messages=prompt_messages,
        group=named.trajectory.trajectory_id,
        tasks=(*((task,) if task else ()), chosen.trajectory.task_id, rejected.trajectory.task_id),
        states_tasks=True,
    )


def _with_unique_id(side: PairSide, ids: UniqueIds) -> PairSide:
    if not side.is_new:
        return side
    unique = ids.claim(side.trajectory.trajectory_id)
    return replace(side, trajectory=msgspec.structs.replace(side.trajectory, trajectory_id=unique))


def _explicit_rows(
    given: str, inputs: list[dict[str, str]], notes: Counter[str]
) -> Iterator[tuple[str, int, Any | RefusedPair]]:
    path = Path(given)
    if path.is_file():
        yield from _values(path, lambda value: isinstance(value, dict) and "chosen" in value, inputs, notes)
        return
    sides = given.split("|")
    if len(sides) != 2 or not all(side.strip() for side in sides):
        raise InputError(
            f"{given!r}: no such file, and no pair of ids",
            hint="give CHOSEN|REJECTED, each the id of a trajectory or `ID#TURN`, or a file with one pair a line",
        )
    yield given, 1, {"chosen": sides[0].strip(), "rejected": sides[1].strip()}


def _values(
    path: Path, is_known: Callable[[Any], bool], inputs: list[dict[str, str]], notes: Counter[str]
) -> Iterator[tuple[str, int, Any | RefusedPair]]:
    """Yield place, number and value of each row in a file of lines or in one list."""
    with _opened(path) as file:
        for read in file.values(is_known):
            place = f"{path.name}:{read.line}" if read.line is not None else path.name
            if read.refused is not None:
                yield place, read.line or 1, RefusedPair(place, read.refused.reason, read.refused.detail)
                continue
            if read.replaced_surrogates:
                notes["replaced_surrogates"] += read.replaced_surrogates
            if not isinstance(read.value, list):
                yield place, read.line or 1, read.value
                continue
            for number, value in enumerate(read.value, start=1):
                yield f"{place}: item {number}", number, value
        inputs.append({"file": path.name, "sha256": file.finish()})


@contextmanager
def _opened(path: Path) -> Iterator[InputFile]:
    """Open a file of rows; what is wrong with all of it becomes the error that names it."""
    try:
        with path.open("rb", buffering=_BUFFER_BYTES) as handle:
            yield InputFile(handle, path)
    except Refused as refused:
        hint = _ROWS_HINT if refused.reason == "unknown_format" else refused.hint
        raise InputError(f"{path}: {refused.reason}: {refused.detail}", hint=hint) from refused
    except OSError as error:
        raise InputError(f"{path}: cannot read rows: {error.strerror or error}") from error
