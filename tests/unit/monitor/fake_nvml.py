"""A stand-in for the `pynvml` module: cards that answer, refuse, or stop answering."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """What every call of the library raises."""


class FakeCard:
    """One card. `refused` names the questions it does not answer, as a MIG card or an old one does."""

    def __init__(self, uuid: str, *, watts: float = 300.0, refused: tuple[str, ...] = (), instances=()) -> None:
        self.uuid, self.watts, self.refused, self.instances = uuid, watts, set(refused), instances
        self.lost = False

    def answer(self, question: str, value: Any) -> Any:
        if self.lost:
            raise NVMLError("GPU is lost")
        if question in self.refused:
            raise NVMLError("Not Supported")
        return value


class FakeNvml:
    """The module. `cards` stand in the driver's order."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *cards: FakeCard, driver: bool = True) -> None:
        self.devices, self.driver, self.open = list(cards), driver, 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self.devices[index]

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: FakeCard) -> bytes:
        return b"NVIDIA RTX 3090"

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> Any:
        return card.answer("memory", SimpleNamespace(used=6 * 2**30, total=24 * 2**30))

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> Any:
        return card.answer("utilization", SimpleNamespace(gpu=97, memory=40))

    def nvmlDeviceGetPowerUsage(self, card: FakeCard) -> int:
        return card.answer("power", round(card.watts * 1000))

    def nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> int:
        return card.answer("temperature", 61)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: FakeCard) -> int:
        return card.answer("link", 1)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: FakeCard) -> int:
        return card.answer("link", 4)

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: FakeCard) -> int:
        return card.answer("link", 16)

    nvmlDeviceGetMaxPcieLinkWidth = nvmlDeviceGetCurrPcieLinkWidth

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:
        return card.answer("mig", len(card.instances) + 1)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, place: int) -> FakeCard:
        if place >= len(card.instances):
            raise NVMLError("Not Found")
        return card.instances[place]
