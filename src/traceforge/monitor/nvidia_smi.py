"""Cards read through `nvidia-smi`, where nvidia-ml-py is missing. One call a sample, each with a time limit.

nvidia-smi is told apart by whole lines: a line with fewer fields than asked for was cut (the tool was killed, or the
driver went away under it), and what stands in it is used as far as it goes whole.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence

from traceforge.monitor.readings import NOTHING, Card, MonitorError, Reading, number_or_none

Run = Callable[[Sequence[str]], str]
"""Runs a command and returns what it wrote, as far as it got; raises OSError if it cannot be run."""

_DESCRIPTION = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "driver_version",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "pcie.link.gen.max",
    "pcie.link.width.max",
)
_SAMPLE = (
    "index",
    "memory.used",
    "memory.total",
    "utilization.gpu",
    "utilization.memory",
    "power.draw",
    "temperature.gpu",
)
_TIME_LIMIT_S = 10.0
_LISTED_CARD = re.compile(r"GPU (\d+): .*\(UUID: (GPU-\S+)\)")
_LISTED_INSTANCE = re.compile(r"\s+MIG (.*?)\s+Device\s+\d+: \(UUID: (MIG-\S+)\)")


def run_tool(command: Sequence[str]) -> str:
    """Return what a command wrote, also of one that failed or was stopped at the time limit."""
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"{command[0]} is not on the PATH")
    try:
        done = subprocess.run(  # noqa: S603 - a fixed program, no shell
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace")
    return done.stdout.decode(errors="replace")


class NvidiaSmi:
    """See `Source`. Of a MIG instance it says nothing: memory and load are told of whole cards only."""

    name = "nvidia-smi"

    def __init__(self, run: Run = run_tool) -> None:
        self._run = run

    def cards(self) -> list[Card]:
        """See `Source.cards`."""
        try:
            shown = self._run(_query(_DESCRIPTION))
            found = [_card(fields) for fields in _lines(shown, _DESCRIPTION)]
            instances = self._instances(found)
        except OSError as error:
            raise MonitorError(f"nvidia-smi: {error}", hint="install the NVIDIA driver") from error
        if not found:
            said = shown.strip().splitlines()
            raise MonitorError(f"nvidia-smi: {said[0] if said else 'no answer'}", hint="see `nvidia-smi`")
        return [each for card in found for each in (card, *(one for one in instances if one.mig_of == card.uuid))]

    def read(self, cards: list[Card]) -> list[Reading]:
        """See `Source.read`."""
        try:
            shown = self._run(_query(_SAMPLE))
        except OSError:
            return [NOTHING] * len(cards)
        by_index = {fields[0].strip(): Reading(*map(number_or_none, fields[1:])) for fields in _lines(shown, _SAMPLE)}
        return [NOTHING if card.mig_of else by_index.get(str(card.index), NOTHING) for card in cards]

    def close(self) -> None:
        """See `Source.close`."""

    def _instances(self, cards: list[Card]) -> list[Card]:
        drivers = {card.index: card.driver for card in cards}
        found, card_index, card_uuid = [], -1, ""
        for line in self._run(("nvidia-smi", "-L")).splitlines():
            if listed := _LISTED_CARD.match(line):
                card_index, card_uuid = int(listed[1]), listed[2]
            elif listed := _LISTED_INSTANCE.match(line):
                driver = drivers.get(card_index)
                found.append(Card(card_index, listed[2], f"MIG {listed[1]}", driver=driver, mig_of=card_uuid))
        return found


def _query(names: Sequence[str]) -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")


def _lines(shown: str, names: Sequence[str]) -> list[list[str]]:
    """Return the fields of each line that begins with a card's number; fields that are missing are empty."""
    found = []
    for line in shown.splitlines(keepends=True):
        fields = line.rstrip("\r\n").split(",")
        if not fields[0].strip().isdigit() or len(fields) > len(names):
            continue
        if not line.endswith("\n"):
            fields = fields[:-1]  # its last number may have lost digits
        if fields:
            found.append(fields + [""] * (len(names) - len(fields)))
    return found


def _card(fields: list[str]) -> Card:
    index, uuid, name, memory, driver, *link = (field.strip() for field in fields)
    numbers = [number_or_none(each) for each in link]
    told = [round(each) for each in numbers if each is not None]
    return Card(
        index=int(index),
        uuid=uuid,
        name=name,
        memory_total_mib=number_or_none(memory),
        driver=driver or None,
        pcie_link="gen {} x{} of gen {} x{}".format(*told) if len(told) == 4 else None,
    )
