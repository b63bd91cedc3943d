"""Whatever a file holds, an ingest keeps it or refuses it, and raises nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trajectory_logs import ingested, mini_log, row, write_rows

keys = st.sampled_from(
    ["role", "content", "messages", "tool_calls", "function", "name", "arguments", "id", "tool_call_id", "type", "text",
     "reasoning", "extra", "response", "choices", "message", "info", "trajectory_format", "tools", "weight", "output",
     "object", "actions", "command", "resolved", "resolved_ids", "patch_exists", "instance_id", "reward",
     "function_call"]
) | st.text(max_size=3)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
roles = st.sampled_from(["system", "user", "assistant", "tool", "exit", "function", "developer"])
loose_messages = st.lists(
    st.dictionaries(keys, json_values, max_size=4).flatmap(lambda held: roles.map(lambda role: {**held, "role": role})),
    max_size=4,
)
loose_logs = st.one_of(
    json_values,
    loose_messages,
    st.builds(
        lambda messages, more: {**more, "messages": messages},
        loose_messages,
        st.dictionaries(keys, json_values, max_size=3),
    ),
    st.builds(
        lambda messages, more: {**mini_log(messages), **more},
        loose_messages,
        st.dictionaries(keys, json_values, max_size=2),
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(loose_logs, min_size=1, max_size=4), indent=st.sampled_from([None, 1]))
def test_any_json_is_kept_or_refused_and_nothing_else_happens(
    values: list[Any], indent: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "any.jsonl"
    path.write_text("\n".join(json.dumps(value, indent=indent) for value in values), encoding="utf-8")
    out = ingested([path, write_rows(tmp_path / "good.jsonl", row("kept"))], tmp_path / "out")
    for each in out.trajectories:
        assert each.turns()
        assert all(message.role in ("system", "user", "assistant", "tool") for message in each.messages)
    assert len({each.trajectory_id for each in out.trajectories}) == out.summary.counts.trajectories
    assert out.summary.counts.trajectories + out.summary.counts.refused + out.summary.counts.side_files >= 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.binary(max_size=80) | st.binary(max_size=60).map(lambda noise: b'{"messages": [' + noise + b"]}\n" + noise)
)
def test_any_bytes_are_refused_and_nothing_else_happens(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(raw)
    out = ingested([path, write_rows(tmp_path / "good.jsonl", row("kept"))], tmp_path / "out")
    assert out.trajectories[-1].trajectory_id == "good:1"
    assert out.reasons
