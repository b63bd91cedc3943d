"""Short ways to write trajectories and to look at rendered samples in tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from traceforge.config import DataSettings
from traceforge.samples.render import Refusal, TurnRenderer
from traceforge.samples.tokens import Sample
from traceforge.trajectories.record import Message, ToolCall, Trajectory

RUNS = Path(__file__).parent / "data" / "trajectories"
TOOL_RUN = RUNS / "mini-swe-agent-v2" / "derived__scikit-learn__scikit-learn-14141.traj.json"
TEXT_RUN = RUNS / "mini-swe-agent-v1" / "astropy__astropy-12907.traj.json"


def system(content: str, **fields: Any) -> Message:
    return Message(role="system", content=content, **fields)


def user(content: str, **fields: Any) -> Message:
    return Message(role="user", content=content, **fields)


def assistant(content: str = "", *calls: ToolCall, **fields: Any) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls, **fields)


def result(content: str, call_id: str | None = None, **fields: Any) -> Message:
    return Message(role="tool", content=content, tool_call_id=call_id, observation=True, **fields)


def call(name: str, arguments: str, call_id: str | None = None) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=call_id)


def trajectory(*messages: Message, tools: tuple[dict[str, Any], ...] = ()) -> Trajectory:
    return Trajectory(
        trajectory_id="run", task_id="task", source_format="test", source_file="test", messages=messages, tools=tools
    )


def load_run(path: Path) -> Trajectory:
    """Read a mini-swe-agent log the short way, without the reader under test elsewhere."""
    messages = []
    for index, raw in enumerate(json.loads(path.read_text(encoding="utf-8"))["messages"]):
        if raw["role"] == "exit":
            continue
        calls = [
            ToolCall(c["function"]["name"], c["function"]["arguments"], c["id"]) for c in raw.get("tool_calls") or []
        ]
        messages.append(
            Message(
                role=raw["role"],
                content=raw.get("content") or "",
                reasoning=raw.get("reasoning_content"),
                tool_calls=tuple(calls),
                tool_call_id=raw.get("tool_call_id"),
                observation=raw["role"] == "tool" or (raw["role"] == "user" and index > 1),
            )
        )
    return Trajectory(
        trajectory_id=path.stem,
        task_id=path.stem,
        source_format="mini-swe-agent",
        source_file=str(path),
        messages=tuple(messages),
    )


def renderer(tokenizer: Any, *, template_kwargs: dict[str, Any] | None = None, **settings: Any) -> TurnRenderer:
    given = {"train": "unused", "max_tokens": 100_000, "length_policy": "refuse", **settings}
    return TurnRenderer(tokenizer, DataSettings(**given), template_kwargs=template_kwargs)


def rendered(tokenizer: Any, run: Trajectory, index: int = -1, **settings: Any) -> Sample:
    """Return the sample of the turn at message `index`; a refusal fails the test."""
    outcome = attempted(tokenizer, run, index, **settings)
    assert isinstance(outcome, Sample), outcome
    return outcome


def attempted(tokenizer: Any, run: Trajectory, index: int = -1, **settings: Any) -> Sample | Refusal:
    return renderer(tokenizer, **settings).render(run, range(len(run.messages))[index], group_id="group")


def refused(tokenizer: Any, run: Trajectory, index: int = -1, **settings: Any) -> Refusal:
    outcome = attempted(tokenizer, run, index, **settings)
    assert isinstance(outcome, Refusal), outcome
    return outcome


def text_of(tokenizer: Any, sample: Sample) -> str:
    text: str = tokenizer.decode(sample.token_ids_S.tolist(), clean_up_tokenization_spaces=False)
    return text


def trained_parts(tokenizer: Any, sample: Sample) -> list[str]:
    """Return the text of each run of neighbouring trained tokens."""
    trained = np.flatnonzero(sample.weights_S)
    runs = np.split(trained, np.flatnonzero(np.diff(trained) > 1) + 1) if trained.size else []
    return [tokenizer.decode(sample.token_ids_S[run].tolist(), clean_up_tokenization_spaces=False) for run in runs]
