"""The background thread that samples, and the two files it writes: gpu.csv (a line per card and sample) and host.csv.

Never ends a run: a driver that vanishes leaves empty fields, which are counted; a disk that is full ends the files, and
the means go on. What a card does not tell is an empty field.
"""

from __future__ import annotations

import csv
import io
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from traceforge.monitor.host import HOST_FIELDS, Host, HostReading
from traceforge.monitor.readings import FIELDS, Card, Reading, Source
from traceforge.monitor.series import CardSeries, Series

GPU_COLUMNS = ("ts", "elapsed_s", "gpu_index", *FIELDS)
HOST_COLUMNS = ("ts", "elapsed_s", *HOST_FIELDS)
INTERVAL_S = 2.0
_STOP_TIMEOUT_S = 15.0


class Sampler:
    """Samples cards and this process until it is stopped.

    Args:
        folder: where gpu.csv (only if there are cards) and host.csv go.
        source: what the cards are read through.
        cards: the run's own, and no others.
        interval_s: from the start of one sample to the start of the next.
        clock: seconds, never going back; the moments given to `energy_j` are of the same clock.
    """

    def __init__(
        self,
        folder: Path,
        source: Source | None = None,
        cards: Sequence[Card] = (),
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert source is not None or not cards, "cards are read through a source"
        self.cards, self.source = list(cards), source
        self.cards_series = [CardSeries() for _ in self.cards]
        self.host_series = {name: Series() for name in HOST_FIELDS}
        self.lost_reason: str | None = None
        """Why nothing more was written, or sampling ended; None = all is well."""
        self._interval_s, self._clock = interval_s, clock
        self._host = Host()
        self._started = clock()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._files: dict[str, TextIO] = {}
        self._folder = folder
        self._thread = threading.Thread(target=self._run, name="traceforge-monitor", daemon=True)

    def start(self) -> None:
        """Take the first sample now and the next ones in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and close the files. Safe to call again."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        if self.source is not None and not self._thread.is_alive():
            self.source.close()

    def sample(self) -> None:
        """Take one sample of every card and of this process."""
        moment, now = self._clock(), datetime.now(UTC)
        readings = self.source.read(self.cards) if self.source is not None and self.cards else []
        host = self._host.read()
        with self._lock:
            for series, reading in zip(self.cards_series, readings, strict=True):
                series.add(moment, reading)
            for name, series_of_host in self.host_series.items():
                series_of_host.add(getattr(host, name))
        self._write(now, moment - self._started, readings, host)

    def energy_j(self, start: float, stop: float) -> float | None:
        """Return the joules of all cards together in a window of the clock; None if one of them does not tell."""
        with self._lock:
            parts = [series.energy_j(start, stop) for series in self.cards_series]
        told = [part for part in parts if part is not None]
        return sum(told) if told and len(told) == len(parts) else None

    def _run(self) -> None:
        try:
            while True:
                before = self._clock()
                self.sample()
                if self._done.wait(max(0.0, self._interval_s - (self._clock() - before))):
                    break
            self.sample()
        except Exception as error:  # whatever a driver does, the run goes on
            self.lost_reason = f"sampling ended: {type(error).__name__}: {error}"
        finally:
            for file in self._files.values():
                file.close()

    def _write(self, now: datetime, elapsed_s: float, readings: Sequence[Reading], host: HostReading) -> None:
        if self.lost_reason is not None:
            return
        stamp = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        head = [stamp, f"{elapsed_s:.3f}"]
        lines = [
            [*head, card.index, *(_number(getattr(reading, name)) for name in FIELDS)]
            for card, reading in zip(self.cards, readings, strict=True)
        ]
        try:
            if lines:
                self._append("gpu.csv", GPU_COLUMNS, lines)
            self._append("host.csv", HOST_COLUMNS, [[*head, *(_number(getattr(host, name)) for name in HOST_FIELDS)]])
        except OSError as error:
            self.lost_reason = f"the files end at {stamp}: {error.strerror or error}"

    def _append(self, name: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
        """Add whole lines in one write."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if name not in self._files:
            path = self._folder / name
            is_new = not path.exists() or path.stat().st_size == 0
            self._files[name] = path.open("a", encoding="utf-8", newline="")
            if is_new:
                writer.writerow(columns)
        writer.writerows(lines)
        self._files[name].write(text.getvalue())
        self._files[name].flush()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}".removesuffix(".0")
