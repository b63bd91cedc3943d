"""Trajectory ids that are unique in a file, and hold none of the characters that part the pieces of other ids."""

from __future__ import annotations

import re

# `#` and `|` part the pieces of sample and pair ids, and control characters break lines and terminals.
_NOT_IN_IDS = re.compile(r"[#|\x00-\x1f\x7f]")


class UniqueIds:
    """Gives each trajectory an id that no other one of the file has: a taken one gets `~2`, `~3` and so on."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def claim(self, wanted: str) -> str:
        """Return the id wanted, or one made from it."""
        base = _NOT_IN_IDS.sub("_", wanted).strip() or "trajectory"
        unique = base
        while unique in self._next:
            self._next[base] += 1
            unique = f"{base}~{self._next[base]}"
        self._next[unique] = 1
        return unique
