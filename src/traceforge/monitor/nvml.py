"""Cards read through NVML, the driver's own library, by way of nvidia-ml-py (`pynvml`)."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from traceforge.monitor.readings import NOTHING, Card, MonitorError, Reading

_MIB = 2**20


class Nvml:
    """See `Source`. A question that a card does not answer is left empty; the others are still asked."""

    name = "NVML"

    def __init__(self) -> None:
        """Load the library.

        Raises:
            MonitorError: nvidia-ml-py is not installed, or there is no driver.
        """
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise MonitorError("nvidia-ml-py is not installed", hint="pip install nvidia-ml-py") from error
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise MonitorError(f"NVML: {error}", hint="install the NVIDIA driver") from error
        self._handles: dict[str, Any] = {}

    def cards(self) -> list[Card]:
        """See `Source.cards`."""
        nvml = self._nvml
        found: list[Card] = []
        try:
            driver = _text(nvml.nvmlSystemGetDriverVersion())
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                card = self._describe(handle, index, driver)
                found += [card, *self._instances(handle, card)]
        except nvml.NVMLError as error:
            raise MonitorError(f"NVML: {error}", hint="see `nvidia-smi`") from error
        return found

    def read(self, cards: list[Card]) -> list[Reading]:
        """See `Source.read`."""
        return [self._read(card) for card in cards]

    def close(self) -> None:
        """See `Source.close`."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _describe(self, handle: Any, index: int, driver: str) -> Card:
        nvml = self._nvml
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        self._handles[uuid] = handle
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        return Card(
            index=index,
            uuid=uuid,
            name=_text(nvml.nvmlDeviceGetName(handle)),
            memory_total_mib=None if memory is None else memory.total / _MIB,
            driver=driver,
            pcie_link=self._pcie_link(handle),
        )

    def _instances(self, handle: Any, card: Card) -> list[Card]:
        nvml = self._nvml
        found = []
        for place in range(self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
            uuid = None if instance is None else self._ask(nvml.nvmlDeviceGetUUID, instance)
            if uuid is None:
                continue
            self._handles[_text(uuid)] = instance
            name = f"MIG instance of {card.name}"
            found.append(Card(card.index, _text(uuid), name, driver=card.driver, mig_of=card.uuid))
        return found

    def _pcie_link(self, handle: Any) -> str | None:
        nvml = self._nvml
        questions = (
            nvml.nvmlDeviceGetCurrPcieLinkGeneration,
            nvml.nvmlDeviceGetCurrPcieLinkWidth,
            nvml.nvmlDeviceGetMaxPcieLinkGeneration,
            nvml.nvmlDeviceGetMaxPcieLinkWidth,
        )
        answers = [self._ask(question, handle) for question in questions]
        return None if None in answers else "gen {} x{} of gen {} x{}".format(*answers)

    def _read(self, card: Card) -> Reading:
        nvml, handle = self._nvml, self._handles.get(card.uuid)
        if handle is None:
            return NOTHING
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        degrees = self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
        return Reading(
            memory_used_mib=None if memory is None else memory.used / _MIB,
            memory_total_mib=None if memory is None else memory.total / _MIB,
            util_gpu=None if busy is None else float(busy.gpu),
            util_mem=None if busy is None else float(busy.memory),
            power_draw_w=None if milliwatts is None else milliwatts / 1000,
            temp_c=None if degrees is None else float(degrees),
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self._nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
