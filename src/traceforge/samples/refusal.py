"""Why a turn gives no sample."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason code to count by, and a sentence for a person.

    Codes: `no_action` `empty_prompt` `template_error` `role_not_rendered` `tool_calls_not_rendered`
    `ending_does_not_follow_generation_prompt` `answer_not_rendered` `no_terminator`
    `border_not_tokenisable` `too_long` `nothing_trained`.
    """

    code: str
    detail: str


class Refused(Exception):
    """Raised inside the renderer, where it becomes the returned `Refusal`; never leaves it."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(code, detail)


class TooLong(Refused):
    """A sample has more tokens than `data.max_tokens`; another cut may still help."""

    def __init__(self, detail: str) -> None:
        super().__init__("too_long", detail)
