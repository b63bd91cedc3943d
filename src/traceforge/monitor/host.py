"""What this process and its host do: resident memory, processor time, load."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

HOST_FIELDS = ("process_rss_mib", "process_cpu_percent", "load_1min")


@dataclass(frozen=True)
class HostReading:
    """One sample. `process_cpu_percent` is 100 for each core kept busy since the sample before."""

    process_rss_mib: float
    process_cpu_percent: float
    load_1min: float | None


class Host:
    """Reads this process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first answer is 0, and starts the count

    def read(self) -> HostReading:
        """Return what is true now."""
        with self._process.oneshot():
            rss = self._process.memory_info().rss
            busy = self._process.cpu_percent()
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return HostReading(rss / 2**20, busy, load)
