"""The split into train and evaluation: by task, so that nothing learned from a task is measured on the same task.

Stable   Which tasks are held out depends on their ids, the seed and the fraction: not on file order, on the model, or
         on which samples of a task survive rendering.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from traceforge.errors import InputError


def stable_hash(identifier: str, *, seed: int) -> str:
    """Return the hex digest that orders tasks and rows: sha256 of `{seed}:{identifier}` in UTF-8."""
    return hashlib.sha256(f"{seed}:{identifier}".encode()).hexdigest()


def held_out_tasks(task_ids: Iterable[str], *, fraction: float, seed: int) -> frozenset[str]:
    """Return the tasks that are held out for evaluation.

    Of the distinct tasks in the order of `stable_hash`, the first `max(1, round(fraction * tasks))` are held out
    (a half rounds to the even neighbour), and never all of them.

    Args:
        task_ids: the task of each sample or trajectory; repetitions count once.
        fraction: share of the tasks, above 0 and below 1.
        seed: `data.seed`.

    Raises:
        InputError: there are fewer than two tasks, so no task can be held out without training on none.
    """
    assert 0 < fraction < 1
    ordered = sorted(set(task_ids), key=lambda task: (stable_hash(task, seed=seed), task))
    if len(ordered) < 2:
        found = f"only one task ({ordered[0]!r})" if ordered else "no task at all"
        raise InputError(
            f"data.evaluation_fraction = {fraction} splits by task, and there is {found}",
            hint="add trajectories of another task, name a second source as data.evaluation, "
            "or set data.evaluation_fraction = 0",
        )
    wanted = max(1, round(fraction * len(ordered)))
    return frozenset(ordered[: min(wanted, len(ordered) - 1)])
