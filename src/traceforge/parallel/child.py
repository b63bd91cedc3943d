"""What a rank does first when `launch.start_ranks` has started it. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Mapping

STARTED_BY = "TRACEFORGE_STARTED_BY"
"""Environment variable of a rank: the process id of its starter, which also gave it its device."""


def settle_in(environment: Mapping[str, str]) -> None:
    """Make this process a good rank, if `start_ranks` started it: output in order, and an end with its starter's."""
    starter = environment.get(STARTED_BY)
    if starter is None:
        return
    # Lines that others append to the log must not be written over: every write goes to its present end.
    fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_APPEND)
    if environment.get("RANK") != "0":
        os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(int(starter),), daemon=True, name="end with the starter").start()


def _end_with(starter: int, *, every_s: float = 1.0, at_last_s: float = 120.0) -> None:
    while os.getppid() == starter:
        time.sleep(every_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(at_last_s)
    os._exit(128 + signal.SIGTERM)
