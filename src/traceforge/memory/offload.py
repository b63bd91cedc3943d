"""Copies between device and host beside computing, and the activations of a row that wait on the host.

    forward    layer 0 ── layer 1 ── … ── layer n        each layer's input, attention output and log-sum-exp leave
                  ╲          ╲              ╲            for the host as soon as they exist
    host       [  0  |       1       |      n  ]         one slab
                  ╱          ╱              ╱
    backward   layer 0 ── layer 1 ── … ── layer n        and come back tile by tile, one layer ahead of their use

Cost     The bytes of `RowPlan` per layer cross the bus once each way; nothing is computed again for it.
Identity Bitwise: copies.

On the CPU the same code runs with plain copies and without streams.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from traceforge.memory.pinned import Slab, aligned


class Lanes:
    """Two side streams of a device, one each way. On the CPU they are the one and only order of execution."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._to_host = torch.cuda.Stream(device) if self.on_cuda else None
        self._to_device = torch.cuda.Stream(device) if self.on_cuda else None

    def _copy(self, stream: Any, target: Tensor, source: Tensor) -> Any:
        """Copy on `stream` and return the event of its end; what the current stream has queued comes first."""
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def to_host(self, target: Tensor, source: Tensor) -> Any:
        """Start a copy to the host after all that is queued now; return its event (None: done)."""
        if self._to_host is None:
            target.copy_(source)
            return None
        self._to_host.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._to_host):
            return self._copy(self._to_host, target, source)

    @contextlib.contextmanager
    def towards_device(self) -> Iterator[None]:
        """Order the copies to the device made inside behind all that is queued now, copies to the host included."""
        if self._to_device is None:
            yield
            return
        self._to_device.wait_stream(torch.cuda.current_stream(self.device))
        self._to_device.wait_stream(self._to_host)
        with torch.cuda.stream(self._to_device):
            yield

    def to_device(self, target: Tensor, source: Tensor) -> Any:
        """Start a copy to the device (inside `towards_device`); return its event (None: done)."""
        if self._to_device is None:
            target.copy_(source)
            return None
        return self._copy(self._to_device, target, source)

    def wait(self, event: Any) -> None:
        """Let the current stream go on only after `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def tiles_of(num_tokens: int, tile_tokens: int) -> list[slice]:
    """Return the tiles of a row: ranges of at most `tile_tokens` that cover it."""
    return [slice(start, min(start + tile_tokens, num_tokens)) for start in range(0, num_tokens, tile_tokens)]


@dataclass(frozen=True)
class Saved:
    """Shape and dtype of what one layer saves under one name.

    `by_tile`: its first dimension is tokens and it comes back tile by tile; otherwise in one piece, behind the tiles.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    by_tile: bool

    @property
    def num_bytes(self) -> int:
        """Bytes on the host, in whole pages."""
        return aligned(math.prod(self.shape) * self.dtype.itemsize)


class Arrival:
    """One saved tensor on its way back; `tile(j)` is safe to read once it has been asked for."""

    def __init__(self, lanes: Lanes, tensor: Tensor, events: list[Any]) -> None:
        self.tensor = tensor
        self._lanes, self._events = lanes, events

    def wait(self, number: int | None = None) -> Tensor:
        """Return the whole tensor, of which tile `number` (None: all) has arrived."""
        for event in self._events if number is None else self._events[number : number + 1]:
            self._lanes.wait(event)
        return self.tensor


class ActivationStore:
    """The activations of one row at a time, on the host.

    Several forward passes may run before a backward only if they save nothing (no gradient): a second one that saves
    overwrites the first, and the first's backward then fails by name.
    """

    def __init__(self, lanes: Lanes, slab: Slab) -> None:
        self.lanes, self.slab = lanes, slab
        self.generation = 0
        self._plan: Mapping[str, Saved] = {}
        self._tiles: list[slice] = []
        self._leaving: list[tuple[Any, Tensor]] = []
        self._arrivals: dict[int, dict[str, Arrival]] = {}

    def begin(self, num_layers: int, plan: Mapping[str, Saved], tiles: list[slice]) -> int:
        """Make room for a row and return its generation, which the backward names.

        Raises:
            HostMemoryError: see `Slab.reserve`.
        """
        self.slab.reserve(num_layers * sum(each.num_bytes for each in plan.values()))
        self._plan, self._tiles = plan, tiles
        self.forget()
        self.generation += 1
        return self.generation

    def forget(self) -> None:
        """Let go of what is on its way: a backward that was broken off leaves some behind."""
        for event, _ in self._leaving:
            self.lanes.wait(event)
        for arrivals in self._arrivals.values():
            for arrival in arrivals.values():
                arrival.wait()
        self._leaving.clear()
        self._arrivals.clear()

    def _on_host(self, layer: int, name: str) -> Tensor:
        start = layer * sum(each.num_bytes for each in self._plan.values())
        for other, saved in self._plan.items():
            if other == name:
                return self.slab.view(start, saved.shape, saved.dtype)
            start += saved.num_bytes
        raise AssertionError(f"{name} is not in the plan of this row")

    def save(self, layer: int, name: str, tensor: Tensor) -> None:
        """Start to copy a tensor to the host. It must not be written before `settle`."""
        event = self.lanes.to_host(self._on_host(layer, name), tensor)
        if event is not None:
            self._leaving.append((event, tensor))

    def settle(self) -> None:
        """Order what follows behind all copies to the host, so that their sources may be reused."""
        for event, _ in self._leaving:
            self.lanes.wait(event)
        self._leaving.clear()

    def prefetch(self, layer: int) -> None:
        """Start to bring back all that a layer saved, tile by tile; room on the device is taken now."""
        if layer < 0 or layer in self._arrivals:
            return
        self._arrivals[layer] = self._bring(layer, list(self._plan))

    def bring_again(self, layer: int, name: str) -> Arrival:
        """Start to bring back one tensor that was let go of on the device in between."""
        return self._bring(layer, [name])[name]

    def _bring(self, layer: int, names: list[str]) -> dict[str, Arrival]:
        sources = {name: self._on_host(layer, name) for name in names}
        targets = {name: torch.empty_like(source, device=self.lanes.device) for name, source in sources.items()}
        events: dict[str, list[Any]] = {name: [] for name in names}
        tiled = [name for name in names if self._plan[name].by_tile]
        with self.lanes.towards_device():
            for tile in self._tiles:
                for name in tiled:
                    events[name].append(self.lanes.to_device(targets[name][tile], sources[name][tile]))
            for name in set(names) - set(tiled):
                events[name].append(self.lanes.to_device(targets[name], sources[name]))
        return {name: Arrival(self.lanes, targets[name], events[name]) for name in names}

    def take(self, layer: int) -> dict[str, Arrival]:
        """Return what a layer saved, and forget it here."""
        self.prefetch(layer)
        return self._arrivals.pop(layer)
