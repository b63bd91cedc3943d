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
    manifest = _read_manifest(folder)
    digests = []
    for name in (TRAJECTORIES, REFERENCES):
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing, but {MANIFEST} names it", hint="build the data set again")
        digests.append(file_sha256(path))
        expected = manifest.get("outputs", {}).get(name, {}).get("sha256")
        if digests[-1] != expected:
            raise InputError(
                f"{path}: sha256 {digests[-1][:12]}… is not the {str(expected)[:12]}… that {MANIFEST} names; "
                "the file was changed or its build was interrupted",
                hint="build the data set again with `traceforge build sft`",
            )
    references: dict[str, list[SampleReference]] = {}
    for reference in _read_references(folder / REFERENCES):
        references.setdefault(reference.trajectory_id, []).append(reference)
    return BuiltFolder(
        folder=folder,
        references=references,
        content_hash=hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        manifest=manifest,
    )


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not (folder / REFERENCES).exists():
        ingested = (folder / TRAJECTORIES).exists()
        raise InputError(
            f"{folder}: no {REFERENCES} in this folder"
            + ("; it holds ingested trajectories, not samples" if ingested else ""),
            hint=f"run `traceforge build sft {folder} -o SAMPLES` and pass SAMPLES"
            if ingested
            else "pass a folder made by `traceforge build sft`, or a .jsonl file of rows",
        )
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{path}: cannot read: {error.strerror}; without it the build is not whole", hint="build the data set again"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}", hint="build the data set again") from error
    schema = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if schema != SCHEMA:
        raise InputError(f"{path}: schema {schema!r}, this version reads {SCHEMA!r}", hint="build the data set again")
    held: dict[str, Any] = manifest
    return held


def _read_references(path: Path) -> Iterator[SampleReference]:
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            try:
                yield _decoder.decode(line)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise InputError(f"{path}:{number}: not a sample reference: {error}") from error
