"""The trajectory record: one agent run, in the one shape that every later stage reads.

Unit     A trajectory is one run of one agent on one task. A turn is one assistant message; turns count from 0.
Files    One JSON object a line in `trajectories.jsonl`, written by `traceforge ingest`.
Lossless `tool_calls[].arguments` stays the JSON *string* the log held (invalid JSON too); it is parsed when rendered.
         Invariants a reader keeps: text is valid Unicode (a lone surrogate became U+FFFD), content is never None and
         never a list of parts, role `exit` and provider payloads (signatures, encrypted reasoning) are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from traceforge.errors import InputError

SCHEMA_VERSION = "traceforge-trajectory/1"

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a tool by the assistant. `arguments` is a JSON string, exactly as logged."""

    name: str
    arguments: str
    id: str | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message. `trained` is None where the log says nothing, else the log's own per-message flag.

    `observation` marks what the environment answered: role `tool`, or a user message that a text-based scaffold
    uses for the output of an action. Length policies shorten observations only.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    trained: bool | None = None
    observation: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """Whether the run solved its task, and who says so. None means that nobody said."""

    resolved: bool | None = None
    reward: float | None = None
    source: str | None = None
    reason: str | None = None


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One agent run. `tools` holds OpenAI function schemas, each with only the keys it was declared with."""

    trajectory_id: str
    task_id: str
    source_format: str
    source_file: str
    messages: tuple[Message, ...]
    model: str | None = None
    scaffold: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    exit_status: str | None = None
    outcome: Outcome = Outcome()
    schema_version: str = SCHEMA_VERSION

    def turns(self) -> list[int]:
        """Return the message index of each assistant turn, in order."""
        return [index for index, message in enumerate(self.messages) if message.role == "assistant"]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Trajectory)


def encode(trajectory: Trajectory) -> bytes:
    """Return the record as one line of UTF-8 JSON, without the newline."""
    return _encoder.encode(trajectory)


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the records of a `trajectories.jsonl`, one at a time.

    Raises:
        InputError: the file is missing, a line is not a record, or its schema is from another version.
    """
    try:
        handle = path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path}: cannot read trajectories: {error.strerror}",
            hint="run `traceforge ingest LOGS -o FOLDER` first and pass FOLDER",
        ) from error
    with handle:
        for number, line in enumerate(handle, start=1):
            if not line.strip():
                continue
            try:
                record = _decoder.decode(line)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise InputError(
                    f"{path}:{number}: not a trajectory record: {error}",
                    hint="trajectories.jsonl is written by `traceforge ingest`; ingest the raw log instead",
                ) from error
            if record.schema_version != SCHEMA_VERSION:
                raise InputError(
                    f"{path}:{number}: schema {record.schema_version!r}, this version reads {SCHEMA_VERSION!r}",
                    hint="ingest the raw logs again with this version",
                )
            yield record
