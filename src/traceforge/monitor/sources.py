"""Where cards are read from: NVML where nvidia-ml-py is installed, else nvidia-smi."""

from __future__ import annotations

from collections.abc import Callable

from traceforge.monitor.nvidia_smi import NvidiaSmi
from traceforge.monitor.nvml import Nvml
from traceforge.monitor.readings import Card, MonitorError, Source

OPENERS: tuple[Callable[[], Source], ...] = (Nvml, NvidiaSmi)


def open_source(openers: tuple[Callable[[], Source], ...] = OPENERS) -> tuple[Source, list[Card]]:
    """Return the first source that answers, and the cards it knows.

    Raises:
        MonitorError: none answers; the message says what each said.
    """
    said = []
    for opener in openers:
        try:
            source = opener()
        except MonitorError as error:
            said.append(error.message)
            continue
        try:
            return source, source.cards()
        except MonitorError as error:
            source.close()
            said.append(error.message)
    raise MonitorError("; ".join(said), hint="install the NVIDIA driver, and nvidia-ml-py beside it")
