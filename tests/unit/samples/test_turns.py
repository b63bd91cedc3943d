"""Which turns are trained, and what their actions are."""

from __future__ import annotations

import pytest
from tests.rendering_cases import assistant, call, result, trajectory, user

from traceforge.samples.turns import actions, fenced_command_span, trained_turns, turn_number


def test_turns_are_trained_unless_the_log_says_no() -> None:
    run = trajectory(
        user("q"), assistant("a"), user("q"), assistant("b", trained=False), user("q"), assistant("c", trained=True)
    )
    assert trained_turns(run) == [1, 5]
    assert [turn_number(run, index) for index in run.turns()] == [0, 1, 2]


def test_a_tool_call_turn_flagged_untrained_is_not_trained() -> None:
    # A20
    run = trajectory(user("q"), assistant("", call("f", "{}"), trained=False), result("r"), assistant("b"))
    assert trained_turns(run) == [3]


def test_the_actions_of_a_turn_are_its_calls_as_logged() -> None:
    turn = assistant("```bash\nls\n```", call("read", '{"a":1}'), call("broken", "{not json"))
    assert actions(turn) == ['read({"a":1})', "broken({not json)"]


@pytest.mark.parametrize(
    ("content", "command"),
    [
        ("THOUGHT: x\n\n```bash\nls\n```\ndone", "```bash\nls\n```"),
        ("```mswea_bash_command\nls -l\ncat a\n```", "```mswea_bash_command\nls -l\ncat a\n```"),
        ("```bash \r\nls\r\n```", "```bash \r\nls\r\n```"),
        ("```bash\n```", "```bash\n```"),
        ("```bash\necho '```' inline\n```", "```bash\necho '```' inline\n```"),
        ("```python\nx\n```", None),
        ("```bash\na\n```\n```bash\nb\n```", None),
        ("```bash\nnever closed", None),
        ("no block", None),
    ],
)
def test_the_action_of_a_text_turn_is_its_one_fenced_shell_block(content: str, command: str | None) -> None:
    span = fenced_command_span(content)
    assert (None if span is None else content[slice(*span)]) == command
    assert actions(assistant(content)) == ([] if command is None else [command])
