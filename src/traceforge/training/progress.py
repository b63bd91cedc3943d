"""What a person sees while a run goes on: a live line in a terminal, plain lines elsewhere. Messages go to stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class RunProgress:
    """Shows updates, loss, tokens per second and the time left; silent when `console` is quiet."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._started = time.monotonic()
        self._first_update = 0

    def say(self, text: str) -> None:
        """Print one message line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def updates(self, *, done: int, total: int) -> Iterator[None]:
        """Show the bar while the updates run."""
        self._started, self._first_update = time.monotonic(), done
        if not self._console.is_terminal:
            yield
            return
        self._live = Progress(
            TextColumn("update"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[rate]} tokens/s  left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._live.add_task("updates", total=total, completed=done, loss="-", rate="-")
        try:
            with self._live:
                yield
        finally:
            self._live = self._task = None

    def update(self, *, number: int, total: int, loss: float, tokens_per_s: float, skipped: bool) -> None:
        """Show one update."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=number, loss=f"{loss:.4f}", rate=f"{tokens_per_s:,.0f}")
            if not skipped:
                return
        mark = "  skipped: not finite" if skipped else ""
        left = "" if skipped else f"  left {self._left(number, total)}"
        self.say(f"update {number}/{total}  loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s{left}{mark}")

    def evaluation(self, *, update: int, losses: dict[str, float]) -> None:
        """Show the losses of the fixed sets."""
        self.say(f"after update {update}: " + "  ".join(f"{name} loss {loss:.4f}" for name, loss in losses.items()))

    def _left(self, number: int, total: int) -> str:
        done = number - self._first_update
        if done < 1:
            return "?"
        seconds = (time.monotonic() - self._started) / done * (total - number)
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}:{rest:02d}"
