"""The update clock: the one counter that schedule, evaluation, log, checkpoints and limits read.

Unit     One update = one `optimizer.step()` that changed the weights. A skipped update (its gradient was not finite)
         consumes its samples and does not tick; it is counted apart.
Why      "Step" means micro-batch, optimizer step or example, depending on the library (ADR 0002).
State    Saved whole in each checkpoint, with the place in the data: `pass_number` and `position` name the update list
         that comes next.
Not here Wall time and tokens per second: see `loop.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Clock:
    """Counts updates. `skipped_in_a_row` decides when to give up."""

    updates: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    pass_number: int = 0
    position: int = 0

    def tick(self) -> None:
        """Count one update that changed the weights."""
        self.updates += 1
        self.skipped_in_a_row = 0

    def skip(self) -> None:
        """Count one update that was not applied."""
        self.skipped += 1
        self.skipped_in_a_row += 1

    def consumed(self, pass_number: int, position: int) -> None:
        """Note that the update list `position` of pass `pass_number` has been used."""
        self.pass_number, self.position = pass_number, position + 1

    def state(self) -> dict[str, int]:
        """Return the whole state as plain numbers."""
        return asdict(self)


def is_due(clock: Clock, every_updates: int | None) -> bool:
    """Return whether something that happens every so many updates is due after this one."""
    return every_updates is not None and clock.updates % every_updates == 0
