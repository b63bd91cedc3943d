"""Turns: which assistant messages are trained, and which part of a turn is its action."""

from __future__ import annotations

import re

from traceforge.trajectories.record import Message, Trajectory

_FENCED_COMMAND = re.compile(r"```(?:mswea_bash_command|bash)[ \t]*\r?\n(?:.*?\n)??```", re.DOTALL)


def trained_turns(trajectory: Trajectory) -> list[int]:
    """Return the message indices of the turns to train, in order.

    A turn is an assistant message. One that the log flags `trained = false` is never trained; a turn that it flags
    true, or says nothing about, is.
    """
    return [index for index in trajectory.turns() if trajectory.messages[index].trained is not False]


def turn_number(trajectory: Trajectory, message_index: int) -> int:
    """Return how many turns come before the one at `message_index`: the number in its sample id."""
    message = trajectory.messages[message_index]
    assert message.role == "assistant", f"message {message_index} of {trajectory.trajectory_id} is no turn"
    return sum(1 for earlier in trajectory.messages[:message_index] if earlier.role == "assistant")


def fenced_command_span(content: str) -> tuple[int, int] | None:
    """Return `[start, stop)` of the one fenced shell command in a turn's text, fences included.

    None if there is no such block or more than one: a text scaffold runs neither.
    """
    blocks = list(_FENCED_COMMAND.finditer(content))
    return blocks[0].span() if len(blocks) == 1 else None


def actions(message: Message) -> list[str]:
    """Return the actions of a turn as text: each tool call as `name(arguments)`, else the one fenced command."""
    if message.tool_calls:
        return [f"{call.name}({call.arguments})" for call in message.tool_calls]
    span = fenced_command_span(message.content)
    return [] if span is None else [message.content[slice(*span)]]
