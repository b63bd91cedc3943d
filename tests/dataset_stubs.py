"""Stand-ins for tokenizer and renderer: one token a byte and no template, so numbers can be counted by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from traceforge.config import DataSettings, DataSource
from traceforge.samples.build import build_sft
from traceforge.samples.refusal import Refusal
from traceforge.samples.tokens import Sample
from traceforge.trajectories.record import Message, Outcome, Trajectory, encode


class ByteTokenizer:
    """Token id = byte + 3; end-of-sequence and padding are both 2."""

    eos_token_id: int | None = 2
    pad_token_id = 2
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [byte + 3 for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return b"".join(b"</s>" if token == 2 else bytes([token - 3]) for token in token_ids).decode(errors="replace")


class ByteRenderer:
    """History contents, then the turn's content and the end token; counts how often it was asked."""

    calls = 0

    def __init__(
        self, tokenizer: Any, settings: DataSettings, *, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._settings = settings
        self.fingerprint = f"bytes/{settings.max_tokens}/{dict(template_kwargs or {})}"

    def render(self, trajectory: Trajectory, message_index: int, *, group_id: str) -> Sample | Refusal:
        type(self).calls += 1
        prompt = "".join(message.content for message in trajectory.messages[:message_index]).encode()
        ending = trajectory.messages[message_index].content.encode()
        if b"{{" in ending:
            return Refusal("template_error", "the template says: no braces")
        num_tokens = len(prompt) + len(ending) + 1
        if num_tokens > self._settings.max_tokens:
            return Refusal("too_long", f"{num_tokens} tokens, data.max_tokens is {self._settings.max_tokens}")
        weights = np.zeros(num_tokens)
        weights[max(1, len(prompt)) :] = 1.0
        turn = trajectory.turns().index(message_index)
        return Sample(
            sample_id=f"{trajectory.trajectory_id}#{turn}",
            group_id=group_id,
            task_id=trajectory.task_id,
            token_ids_S=np.array([byte + 3 for byte in prompt + ending] + [2], dtype=np.int64),
            weights_S=weights,
            cuts=("observations_shortened",) if b"cut me" in prompt else (),
        )


def user(content: str) -> Message:
    return Message(role="user", content=content)


def assistant(content: str, **fields: Any) -> Message:
    return Message(role="assistant", content=content, **fields)


def trajectory(name: str, *messages: Message, task: str | None = None, resolved: bool | None = None) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        task_id=task or name,
        source_format="test",
        source_file=f"{name}.json",
        messages=messages,
        outcome=Outcome(resolved=resolved),
    )


def run_of(name: str, turns: int, *, task: str | None = None) -> Trajectory:
    """Return a trajectory of `turns` assistant turns, each answered."""
    messages = [user(f"{name}: task.")]
    for turn in range(turns):
        messages += [assistant(f"act {turn}."), user(f"seen {turn}.")]
    return trajectory(name, *messages, task=task)


def write_trajectories(folder: Path, *trajectories: Trajectory) -> Path:
    """Return an ingest folder with these trajectories."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trajectories.jsonl").write_bytes(b"".join(encode(one) + b"\n" for one in trajectories))
    return folder


def built(tmp_path: Path, *trajectories: Trajectory, name: str = "samples") -> Path:
    """Return a built data set of these trajectories."""
    build_sft(write_trajectories(tmp_path / f"{name}-ingested", *trajectories), tmp_path / name)
    return tmp_path / name


def settings_for(path: Path | str, **fields: Any) -> DataSettings:
    return DataSettings(train=(DataSource(path=str(path)),), **fields)


def sample(sample_id: str, token_ids: Sequence[int], weights: Sequence[float], group: str | None = None) -> Sample:
    return Sample(
        sample_id=sample_id,
        group_id=group or sample_id,
        task_id=group or sample_id,
        token_ids_S=np.array(token_ids, dtype=np.int64),
        weights_S=np.array(weights, dtype=np.float64),
    )
