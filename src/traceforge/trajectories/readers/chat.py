"""OpenAI-style chat rows: `messages`, `tools`, a `weight` per message, and what data sets add around them.

Shapes   `{"messages": […], "tools": […]}` as a line, a list item or a whole file; a bare list of messages.
Added    `instance_id`, `task_id`, `traj_id`, `trajectory_id`, `id`, `run_id`, `model`, `resolved`, `verified`,
         `reward`, `exit_status`. Keys that are not read are counted in the manifest as `unread_key:NAME`.
Never    marks a user message as an observation: in a chat row a user is a user.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from traceforge.trajectories.readers.content import parse_text, read_tools
from traceforge.trajectories.readers.messages import pair_results, read_message
from traceforge.trajectories.readers.reader import Origin, Reader
from traceforge.trajectories.record import Outcome, Trajectory
from traceforge.trajectories.refusals import Refused
from traceforge.trajectories.text import kind_of

FORMAT = "openai-messages"

_ID_KEYS = ("trajectory_id", "traj_id", "id", "instance_id", "task_id")
_TASK_KEYS = ("task_id", "instance_id")
_RESOLVED_KEYS = ("resolved", "verified")
_MODEL_KEYS = ("model", "model_name", "model_name_or_path")
_READ_KEYS = frozenset(
    (
        *("messages", "tools", "functions", "parallel_tool_calls", "system", "run_id", "reward", "exit_status"),
        *_ID_KEYS,
        *_TASK_KEYS,
        *_RESOLVED_KEYS,
        *_MODEL_KEYS,
    )
)
# Files that hold `messages` beside what is not the conversation alone: requests with a reply, other agents' sessions.
_FOREIGN_KEYS = ("response", "sessionId", "nodes", "chosen", "rejected", "completion")

# A row that says whether its answer is wanted at all is half a preference; read as a chat it would teach the unwanted.
_VERDICT_KEYS = ("label", "kto_tag")

# `owner__repository-number` and what a data set hangs on it to tell runs of one instance apart.
_SWE_BENCH_RUN = re.compile(r"(?P<task>[\w.-]+__[\w.-]+-\d+)_\d+")
_LARGEST_ID = 10**30
_K_OF_N_RUN = re.compile(r"(?P<task>.+?)\.\d+-of-\d+(?:\..*)?")


def matches(value: Any) -> bool:
    """Whether a value is a chat row or a bare list of messages."""
    if isinstance(value, list):
        return is_message_list(value)
    if not isinstance(value, dict) or any(value.get(key) is not None for key in _FOREIGN_KEYS):
        return False
    if any(isinstance(value.get(key), bool) for key in _VERDICT_KEYS):
        return False
    messages = value.get("messages")
    return isinstance(messages, str) or messages == [] or (isinstance(messages, list) and is_message_list(messages))


def is_message_list(value: list[Any]) -> bool:
    """Whether a list looks like messages: one of its first items is an object with a role."""
    return any(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value[:8])


def read(value: Any, origin: Origin) -> Trajectory:
    """Return the trajectory of one row.

    Raises:
        Refused: with the reason, naming the message.
    """
    row: dict[str, Any] = value if isinstance(value, dict) else {"messages": value}
    if row.get("system") is not None:
        raise Refused("unsupported_content", "a top-level `system`: Anthropic messages, not chat messages")
    messages = read_messages(row.get("messages"), origin)
    for key in row.keys() - _READ_KEYS:
        origin.notes[f"unread_key:{key[:80]}"] += 1
    tools = row.get("tools")
    own_id = first_name(row, _ID_KEYS)
    wanted = own_id if own_id is not None else f"{origin.stem}:{origin.row}"
    run = first_name(row, ("run_id",))
    instance = first_name(row, _TASK_KEYS)
    if run is not None and wanted == instance:
        wanted = f"{wanted}.{run}"
    return Trajectory(
        trajectory_id=wanted,
        task_id=task_of(instance if instance is not None else wanted),
        source_format=FORMAT,
        source_file=origin.file,
        model=first_name(row, _MODEL_KEYS),
        tools=read_tools(row.get("functions") if tools is None else tools, origin.notes),
        messages=tuple(pair_results([read_message(raw, index) for index, raw in enumerate(messages)])),
        exit_status=first_name(row, ("exit_status",)),
        outcome=_read_outcome(row, origin),
    )


def read_messages(messages: Any, origin: Origin) -> list[Any]:
    """Return the list of raw messages; a data set may hold it as JSON text.

    Raises:
        Refused: `no_messages`.
    """
    if isinstance(messages, str):
        messages = parse_text(messages, "messages", origin.notes)
    if not isinstance(messages, list):
        raise Refused("no_messages", f"messages is {kind_of(messages)}, not a list")
    if not messages:
        raise Refused("no_messages", "the list of messages is empty")
    return messages


def task_of(instance_id: str) -> str:
    """Return a task id without the suffix that tells runs of one task apart, where that suffix is known.

    Known: `owner__repository-123_4` and `task.4-of-8.run`.
    """
    for pattern in (_SWE_BENCH_RUN, _K_OF_N_RUN):
        match = pattern.fullmatch(instance_id)
        if match is not None:
            return match["task"]
    return instance_id


def first_name(row: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    """Return the first of `keys` that holds a name: text, or a number as text."""
    for key in keys:
        held = row.get(key)
        if isinstance(held, str) and held:
            return held
        if isinstance(held, int) and not isinstance(held, bool) and abs(held) < _LARGEST_ID:
            return str(held)
    return None


def _read_outcome(row: dict[str, Any], origin: Origin) -> Outcome:
    resolved = None
    source = None
    for key in _RESOLVED_KEYS:
        held = row.get(key)
        if isinstance(held, (bool, int, float)) and held in (0, 1):
            resolved, source = bool(held), f"row:{key}"
            break
        if held is not None:
            origin.notes[f"unread_value:{key}"] += 1
    reward = row.get("reward")
    if isinstance(reward, (int, float)) and not isinstance(reward, bool) and abs(reward) <= sys.float_info.max:
        return Outcome(resolved=resolved, reward=float(reward), source=source or "row:reward")
    if reward is not None:
        origin.notes["unread_value:reward"] += 1
    return Outcome(resolved=resolved, source=source)


READER = Reader(name=FORMAT, matches=matches, read=read)
