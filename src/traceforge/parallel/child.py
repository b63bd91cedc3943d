"""What a rank does first, whoever started it. Imports no torch."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

STARTED_BY = "TRACEFORGE_STARTED_BY"
"""Environment variable of a rank: the process id of its starter, which also gave it its device."""
RUN_FOLDER = "TRACEFORGE_RUN_FOLDER"
"""Environment variable of a rank: the run folder that its starter has made."""


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


def speak_to(log: Path) -> None:
    """Send all that this process says from here on to the end of a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _end_with(starter: int, *, every_s: float = 1.0, at_last_s: float = 120.0) -> None:
    while os.getppid() == starter:
        time.sleep(every_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(at_last_s)
    os._exit(128 + signal.SIGTERM)
