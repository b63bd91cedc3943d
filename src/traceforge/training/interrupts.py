"""Stopping on request: the first SIGINT or SIGTERM lets the update in work finish, a second one stops at once.

Ranks get a signal at different moments, so none acts on its own: they add up their votes between updates.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from traceforge.errors import TrainingError


class Stop(BaseException):
    """Stop at once. Not an `Exception`, so that nothing swallows it. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Interrupted(TrainingError):
    """The run was asked to stop. The exit code is 128 + the signal: 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, message: str, *, number: int, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = 128 + number


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked to stop. While `finish_update` is set the first request only becomes a vote.

    `number` is the signal that all ranks stop for, once they have agreed.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.finish_update = False
        self._asked: int | None = None
        self._deaf = False

    def votes(self) -> list[float]:
        """Return what this rank was asked for: one number for each signal, to be added up over the ranks."""
        return [float(self._asked == number) for number in _SIGNALS]

    def heed(self, votes: Sequence[float]) -> bool:
        """Take the votes of all ranks and return whether to stop, which is the same on all of them."""
        if self.number is None:
            self.number = next((int(number) for number, asked in zip(_SIGNALS, votes, strict=True) if asked), None)
        return self.number is not None

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Answer no signal inside: the last words of a run are written."""
        self._deaf = True
        try:
            yield
        finally:
            self._deaf = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over SIGINT and SIGTERM inside; only the main thread can, elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deaf:
            return
        if self.finish_update and self._asked is None:
            self._asked = number
            return
        raise Stop(number)
