"""The `transcript` rendering: the history as one user message, the turn as the answer.

    [SYSTEM #0]
    ...

    [ASSISTANT #2]
    Reasoning:
    ...

    the turn's own text

    Action:
    name(arguments)

Every message begins with its role and index; parts and messages are joined by a blank line. Arguments stand as logged.
"""

from __future__ import annotations

from collections.abc import Sequence

from traceforge.samples.turns import actions
from traceforge.trajectories.record import Message

SYSTEM_LINE = "You are learning from a debug trajectory."
CLOSING_LINE = "Predict next action."


def turn_text(message: Message) -> str:
    """Return an assistant message as text: reasoning, text, then each call."""
    parts = [f"Reasoning:\n{message.reasoning}"] if message.reasoning else []
    if message.content:
        parts.append(message.content)
    parts.extend(_action(f"{call.name}({call.arguments})") for call in message.tool_calls)
    return "\n\n".join(parts)


def action_text(message: Message) -> str | None:
    """Return only the actions of an assistant message, or None if it has none.

    A tool call stands as in the whole turn; the command of a text scaffold stands as the fenced block it is.
    """
    found = actions(message)
    if not found:
        return None
    return "\n\n".join(_action(text) for text in found) if message.tool_calls else found[0]


def message_block(index: int, message: Message) -> str:
    """Return one message of the history under its header."""
    text = turn_text(message) if message.role == "assistant" else message.content
    return f"[{message.role.upper()} #{index}]\n{text}"


def transcript_messages(task_id: str, blocks: Sequence[str], answer: str) -> tuple[Message, Message, Message]:
    """Return the three messages of a sample: the system line, the history, the answer."""
    history = "\n\n".join(blocks)
    return (
        Message(role="system", content=SYSTEM_LINE),
        Message(role="user", content=f"Case: {task_id}\n{history}\n{CLOSING_LINE}"),
        Message(role="assistant", content=answer),
    )


def _action(text: str) -> str:
    return f"Action:\n{text}"
