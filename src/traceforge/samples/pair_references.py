"""A folder of preference pairs on disk: references into its trajectories, without tokens and without a model.

Side     A side is a trajectory as far as `chosen_messages` or `rejected_messages`. Its first `prompt_messages` messages
         are the prompt, the same on both sides; the rest is its ending. A prompt is whole messages, never a run of
         tokens.
Linear   A pair of turns names the trajectory that it takes them from; no history is written twice for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from traceforge.errors import InputError
from traceforge.samples.pair_sides import same_messages
from traceforge.samples.references import PAIRS, check_built
from traceforge.samples.trajectory_index import TrajectoryIndex
from traceforge.trajectories.output import TRAJECTORIES
from traceforge.trajectories.record import Trajectory

PAIR_SCHEMA = "traceforge-pairs/1"
COMMAND = "build pairs"


class PairReference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of `pairs.jsonl`.

    Args:
        pair_id: `{chosen id}|{rejected id}`; an id is a trajectory's, or `{trajectory_id}#{turn}`.
        chosen: trajectory id.
        rejected: trajectory id.
        prompt_messages: how many messages the sides share as the prompt.
        chosen_messages: how many messages of its trajectory the chosen side has, prompt included.
        rejected_messages: the same of the rejected side.
        task_id: what the split into train and evaluation keeps together; pairs of one prompt have one task.
        group: what an update never splits: the trajectory that pairs fork from, or the pair itself.
    """

    pair_id: str
    chosen: str
    rejected: str
    prompt_messages: int
    chosen_messages: int
    rejected_messages: int
    task_id: str
    group: str


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(PairReference)


def encode_pair_reference(reference: PairReference) -> bytes:
    """Return the reference as one line of UTF-8 JSON, without the newline."""
    return _encoder.encode(reference)


@dataclass(frozen=True)
class PairFolder:
    """A folder made by `traceforge build pairs`, with its hashes checked.

    Args:
        folder: where it lies.
        references: its pairs, in file order.
        content_hash: sha256 over the hashes of its two data files.
        manifest: as written by the build.
    """

    folder: Path
    references: tuple[PairReference, ...]
    content_hash: str
    manifest: dict[str, Any]

    @property
    def is_synthetic(self) -> bool:
        """Whether the texts are random words, made for trials of speed and memory."""
        return bool(self.manifest.get("settings", {}).get("synthetic"))

    @cached_property
    def trajectories(self) -> TrajectoryIndex:
        """The records that the references point into.

        Raises:
            InputError: see `TrajectoryIndex`.
        """
        return TrajectoryIndex(self.folder / TRAJECTORIES)

    def sides(self, reference: PairReference) -> tuple[Trajectory, Trajectory]:
        """Return the trajectories of a pair, chosen first, not cut to what the pair takes of them.

        Raises:
            InputError: the reference points to nothing, or its sides do not share the prompt it names.
        """
        for trajectory_id in (reference.chosen, reference.rejected):
            if trajectory_id not in self.trajectories:
                raise self._wrong(f"trajectory {trajectory_id!r} of {reference.pair_id} is not in {TRAJECTORIES}")
        chosen, rejected = self.trajectories.get(reference.chosen), self.trajectories.get(reference.rejected)
        stops = ((chosen, reference.chosen_messages), (rejected, reference.rejected_messages))
        if any(not 0 < reference.prompt_messages < stop <= len(side.messages) for side, stop in stops):
            raise self._wrong(f"{reference.pair_id} names messages that its trajectories do not have")
        prompts = zip(chosen.messages[: reference.prompt_messages], rejected.messages, strict=False)
        if chosen.tools != rejected.tools or not all(itertools.starmap(same_messages, prompts)):
            raise self._wrong(f"the sides of {reference.pair_id} do not share its prompt")
        return chosen, rejected

    def _wrong(self, what: str) -> InputError:
        return InputError(f"{self.folder / PAIRS}: {what}", hint=f"build the pairs again with `traceforge {COMMAND}`")


def open_pairs(folder: Path) -> PairFolder:
    """Return the pairs in `folder` after checking both data files against its manifest.

    Raises:
        InputError: the folder holds no pairs, was made by another version, is incomplete, or was changed afterwards.
    """
    manifest, content_hash = check_built(folder, references=PAIRS, schema=PAIR_SCHEMA, command=COMMAND)
    return PairFolder(folder, tuple(_read_references(folder / PAIRS)), content_hash, manifest)


def _read_references(path: Path) -> Iterator[PairReference]:
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            try:
                yield _decoder.decode(line)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise InputError(f"{path}:{number}: not a pair reference: {error}") from error
