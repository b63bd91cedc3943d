"""Which pairs belong to one task: those that say so, and those that share a prompt, whatever they call their tasks.

Why      The split into train and evaluation is by task. Rows of one prompt often have no task at all, and two runs of
         one task may bear two names; were they parted, the evaluation would measure what was trained.
"""

from __future__ import annotations

from collections.abc import Sequence


class TaskNames:
    """Tasks, joined as pairs show that they are the same. A joined task has the name that came first."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._order: dict[str, int] = {}
        self._by_prompt: dict[bytes, str] = {}
        self._stated: set[str] = set()
        self.num_joined = 0
        """How often two tasks that were both stated proved to be one."""

    def add(self, tasks: Sequence[str], *, prompt: bytes, stated: bool) -> str:
        """Join the tasks of a pair's sides with each other and with those of all pairs of this prompt.

        Returns one of them; `name` gives the joined name when all pairs are in.

        Args:
            tasks: of its sides; at least one.
            prompt: the same bytes for the same prompt.
            stated: a person or a log named the tasks; else their names are made up and joining them is no news.
        """
        first = tasks[0]
        for task in tasks:
            self._know(task, stated)
        for task in (*tasks, self._by_prompt.setdefault(prompt, first)):
            self._join(first, task)
        return first

    def name(self, task: str) -> str:
        """Return the name of the joined task."""
        root = task
        while self._parents[root] != root:
            root = self._parents[root]
        while self._parents[task] != root:
            self._parents[task], task = root, self._parents[task]
        return root

    def _know(self, task: str, stated: bool) -> None:
        if task not in self._parents:
            self._parents[task] = task
            self._order[task] = len(self._order)
        if stated:
            self._stated.add(self.name(task))

    def _join(self, one: str, other: str) -> None:
        first, second = sorted((self.name(one), self.name(other)), key=self._order.__getitem__)
        if first != second:
            self._parents[second] = first
            self.num_joined += first in self._stated and second in self._stated
            if second in self._stated:
                self._stated.add(first)
