"""Label files from disk: which of the given paths hold SWE-bench verdicts.

A file that is named must be a label file. In folders and globs, where an evaluation leaves its logs and patches beside
its reports, everything else is passed over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from traceforge.errors import InputError
from traceforge.trajectories.manifest import LabelFile
from traceforge.trajectories.outcomes import Label, folder_of, labels_in
from traceforge.trajectories.refusals import Refusal, Refused
from traceforge.trajectories.sources import discover, shown_path
from traceforge.trajectories.text import UTF8_BOM, parse_json

_HINT = "--labels takes SWE-bench `report.json` files, run summaries, and folders or globs that hold them"


@dataclass
class LabelSet:
    """The label files that were read, every label in them, and what could not be looked at."""

    files: list[LabelFile] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


def read_labels(inputs: Sequence[str]) -> LabelSet:
    """Return the labels in the files that the inputs name.

    Raises:
        InputError: an input names no file, a named file holds no labels, or none of a folder's files does.
    """
    known = LabelSet()
    seen: set[str] = set()
    for given in inputs:
        found = False
        discovery = discover([given])
        known.refusals.extend(discovery.refusals)
        for path in discovery.files:
            if str(path) in seen:
                found = True
                continue
            read = _read_label_file(path, must_be=Path(given).is_file())
            if read is not None:
                found = True
                seen.add(str(path))
                known.files.append(read[0])
                known.labels.extend(read[1])
        if not found:
            raise InputError(f"{shown_path(given)}: no file here holds labels", hint=_HINT)
    return known


def _read_label_file(path: Path, *, must_be: bool) -> tuple[LabelFile, list[Label]] | None:
    shown = shown_path(path)
    try:
        with path.open("rb") as handle:
            head = handle.read(1 << 12).removeprefix(UTF8_BOM).lstrip()
            looks_like_json = head[:1] == b"{"
            handle.seek(0)
            raw = handle.read() if looks_like_json else b""
    except OSError as error:
        raise InputError(f"{shown}: cannot read labels: {error.strerror}", hint=_HINT) from error
    verdicts = None
    why = "it does not begin like a JSON object"
    if looks_like_json:
        try:
            verdicts = labels_in(parse_json(raw.removeprefix(UTF8_BOM)).value, shown)
            why = "its JSON has none of the known shapes"
        except Refused as refused:
            why = f"{refused.reason}: {refused.detail}"
    if verdicts is not None:
        folder = folder_of(shown)
        entry = LabelFile(path=shown, bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest(), labels=len(verdicts))
        return entry, [Label(verdict, shown, folder) for verdict in verdicts]
    if must_be:
        raise InputError(f"{shown}: holds no labels: {why}", hint=_HINT)
    return None
