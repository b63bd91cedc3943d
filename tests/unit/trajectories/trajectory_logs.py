"""Logs made for one test each, and what came out of an ingest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from traceforge.trajectories.ingest import ingest
from traceforge.trajectories.manifest import IngestSummary
from traceforge.trajectories.record import Message, Trajectory, read_trajectories

BUNDLED = Path(__file__).resolve().parents[2] / "data" / "trajectories"

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}


def call(call_id: str | None, command: str = "ls", *, arguments: Any = None) -> dict[str, Any]:
    """One tool call as the chat API writes it."""
    given = json.dumps({"command": command}) if arguments is None else arguments
    held = {"type": "function", "function": {"name": "bash", "arguments": given}}
    return held if call_id is None else {"id": call_id, **held}


def result(call_id: str | None, content: str = "done", **more: Any) -> dict[str, Any]:
    """One tool result."""
    return {"role": "tool", "content": content, **({} if call_id is None else {"tool_call_id": call_id}), **more}


def row(text: str, **more: Any) -> dict[str, Any]:
    """One chat row with one answer."""
    return {"messages": [USER, {"role": "assistant", "content": text}], **more}


def names(folder: Path) -> list[str]:
    """The names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def write_rows(path: Path, *rows: Any) -> Path:
    """Write JSON lines; text and bytes are written as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write one indented JSON document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
    return path


class Ingested:
    """An ingest's summary, manifest and records."""

    def __init__(self, summary: IngestSummary, folder: Path) -> None:
        self.summary = summary
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        self.trajectories: list[Trajectory] = list(read_trajectories(folder / "trajectories.jsonl"))

    @property
    def reasons(self) -> list[tuple[str, int | None, str]]:
        """File name, line and reason of every refusal."""
        return [(Path(each["file"]).name, each["line"], each["reason"]) for each in self.manifest["refusals"]]

    def details(self) -> str:
        """What all refusals say."""
        return "\n".join(each["detail"] for each in self.manifest["refusals"])


def ingested(inputs: Path | list[Path], output: Path, *, labels: list[Path] | None = None) -> Ingested:
    """Run an ingest and read back what it wrote."""
    paths = inputs if isinstance(inputs, list) else [inputs]
    summary = ingest([str(path) for path in paths], output, labels=[str(path) for path in labels or []])
    return Ingested(summary, output)


def messages_of(messages: list[Any], tmp_path: Path, **row: Any) -> tuple[Message, ...]:
    """Return the record's messages for one chat row, beside a row that keeps the ingest alive."""
    path = write_rows(tmp_path / "rows.jsonl", {"messages": [USER, ANSWER]}, {"messages": messages, **row})
    return ingested(path, tmp_path / "out").trajectories[1].messages


def refusal_of(messages: list[Any], tmp_path: Path, **row: Any) -> dict[str, Any]:
    """Return the one refusal for a chat row on line 2."""
    path = write_rows(tmp_path / "rows.jsonl", {"messages": [USER, ANSWER]}, {"messages": messages, **row})
    refusals: list[dict[str, Any]] = ingested(path, tmp_path / "out").manifest["refusals"]
    assert [each["line"] for each in refusals] == [2]
    return refusals[0]


def mini_log(messages: list[Any], *, version: str = "mini-swe-agent-1.1", **top: Any) -> dict[str, Any]:
    """A mini-swe-agent log around messages."""
    return {
        "trajectory_format": version,
        "info": {
            "exit_status": "Submitted",
            "mini_version": "2.0.0",
            "config": {"model": {"model_name": "some/model"}},
        },
        "messages": [
            {"role": "system", "content": "You can use bash."},
            {"role": "user", "content": "Fix it."},
            *messages,
        ],
        **top,
    }
