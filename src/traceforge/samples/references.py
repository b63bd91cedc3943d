"""A built data set on disk: references to turns, the trajectories they point into, and the manifest that vouches.

Linear   A reference names a turn; the history before it is not repeated. Tokenising happens where the model is known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from traceforge.errors import InputError
from traceforge.folders import MANIFEST
from traceforge.hashes import file_sha256
from traceforge.trajectories.output import TRAJECTORIES
from traceforge.trajectories.record import Trajectory, read_trajectories

SCHEMA = "traceforge-sft/1"
REFERENCES = "sft.jsonl"
PAIRS = "pairs.jsonl"


class SampleReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of `sft.jsonl`: the turn that is trained. `turn` counts assistant turns, `message_index` messages."""

    sample_id: str
    trajectory_id: str
    task_id: str
    turn: int
    message_index: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(SampleReference)


def encode_reference(reference: SampleReference) -> bytes:
    """Return the reference as one line of UTF-8 JSON, without the newline."""
    return _encoder.encode(reference)


@dataclass(frozen=True, slots=True)
class BuiltFolder:
    """A folder made by `traceforge build sft`, with its hashes checked.

    Args:
        folder: where it lies.
        references: its samples, by trajectory, in file order.
        content_hash: sha256 over the hashes of its two data files.
        manifest: as written by the build.
    """

    folder: Path
    references: dict[str, list[SampleReference]]
    content_hash: str
    manifest: dict[str, Any]

    @property
    def num_samples(self) -> int:
        """How many samples the folder names."""
        return sum(len(members) for members in self.references.values())

    def trajectories(self) -> Iterator[tuple[Trajectory, list[SampleReference]]]:
        """Yield each trajectory that has samples, with its references, one at a time.

        Raises:
            InputError: a reference points to nothing.
        """
        path = self.folder / TRAJECTORIES
        waiting = dict(self.references)
        for trajectory in read_trajectories(path):
            references = waiting.pop(trajectory.trajectory_id, None)
            if references is None:
                continue
            turns = trajectory.turns()
            for reference in references:
                if not 0 <= reference.turn < len(turns) or turns[reference.turn] != reference.message_index:
                    raise InputError(
                        f"{self.folder / REFERENCES}: {reference.sample_id} names message {reference.message_index} "
                        f"as turn {reference.turn}, which {path} does not have",
                        hint="build the data set again with `traceforge build sft`",
                    )
            yield trajectory, references
        if waiting:
            raise InputError(
                f"{self.folder / REFERENCES}: trajectory {next(iter(waiting))!r} is not in {path}",
                hint="build the data set again with `traceforge build sft`",
            )


def open_built(folder: Path) -> BuiltFolder:
    """Return the data set in `folder` after checking both data files against its manifest.

    Raises:
        InputError: the folder is no build, was made by another version, is incomplete, or was changed afterwards.
    """
    manifest, content_hash = check_built(folder, references=REFERENCES, schema=SCHEMA, command="build sft")
    references: dict[str, list[SampleReference]] = {}
    for reference in _read_references(folder / REFERENCES):
        references.setdefault(reference.trajectory_id, []).append(reference)
    return BuiltFolder(
        folder=folder,
        references=references,
        content_hash=content_hash,
        manifest=manifest,
    )


def check_built(folder: Path, *, references: str, schema: str, command: str) -> tuple[dict[str, Any], str]:
    """Return the manifest of a built folder and the sha256 over its two data files, which the manifest vouches for.

    Args:
        references: name of the file beside `trajectories.jsonl` that makes the folder one of this kind.
        schema: of the manifest.
        command: the verb that makes such folders, for hints.

    Raises:
        InputError: the folder is no such build, was made by another version, is incomplete, or was changed afterwards.
    """
    manifest = _read_manifest(folder, references, schema, command)
    digests = []
    for name in (TRAJECTORIES, references):
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing, but {MANIFEST} names it", hint="build the data set again")
        digests.append(file_sha256(path))
        expected = manifest.get("outputs", {}).get(name, {}).get("sha256")
        if digests[-1] != expected:
            raise InputError(
                f"{path}: sha256 {digests[-1][:12]}… is not the {str(expected)[:12]}… that {MANIFEST} names; "
                "the file was changed or its build was interrupted",
                hint=f"build the data set again with `traceforge {command}`",
            )
    return manifest, hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _read_manifest(folder: Path, references: str, schema: str, command: str) -> dict[str, Any]:
    path = folder / MANIFEST
    if not (folder / references).exists():
        raise _not_of_this_kind(folder, references, command)
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{path}: cannot read: {error.strerror}; without it the build is not whole", hint="build the data set again"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}", hint="build the data set again") from error
    found = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if found != schema:
        raise InputError(f"{path}: schema {found!r}, this version reads {schema!r}", hint="build the data set again")
    held: dict[str, Any] = manifest
    return held


def _not_of_this_kind(folder: Path, references: str, command: str) -> InputError:
    missing = f"{folder}: no {references} in this folder"
    if references != PAIRS and (folder / PAIRS).exists():
        return InputError(
            f"{missing}; it holds preference pairs, not samples",
            hint='pairs are trained with objective.method = "simpo" or "dpo"',
        )
    if references != REFERENCES and (folder / REFERENCES).exists():
        return InputError(
            f"{missing}; it holds samples, not preference pairs",
            hint='samples are trained with objective.method = "sft"; pairs are made by `traceforge build pairs`',
        )
    if (folder / TRAJECTORIES).exists():
        extra = " --pair PAIRS.jsonl" if references == PAIRS else ""
        return InputError(
            f"{missing}; it holds ingested trajectories, not {'pairs' if references == PAIRS else 'samples'}",
            hint=f"run `traceforge {command} {folder}{extra} -o SAMPLES` and pass SAMPLES",
        )
    rows = "" if references == PAIRS else ", or a .jsonl file of rows"
    return InputError(missing, hint=f"pass a folder made by `traceforge {command}`{rows}")


def _read_references(path: Path) -> Iterator[SampleReference]:
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            try:
                yield _decoder.decode(line)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise InputError(f"{path}:{number}: not a sample reference: {error}") from error
