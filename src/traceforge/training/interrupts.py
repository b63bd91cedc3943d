"""Stopping on request: the first SIGINT or SIGTERM lets the update in work finish, a second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
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


class StopRequest:
    """Whether somebody asked to stop. While `finish_update` is set the first request only sets `number`."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.finish_update = False

    @property
    def requested(self) -> bool:
        """Whether the loop should end after this update."""
        return self.number is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over SIGINT and SIGTERM inside; only the main thread can, elsewhere nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.finish_update and self.number is None:
            self.number = number
            return
        raise Stop(number)
