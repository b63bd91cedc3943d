"""AdamW whose moments live in page-locked host memory and visit the device a window of parameters at a time.

Cost     Saves 8 bytes a trained weight on the device; they cross the bus once each way per update, the next window
         behind the arithmetic of this one.
Identity `torch.optim.AdamW`, bit for bit on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from traceforge.lean_sizes import WINDOW_WEIGHTS
from traceforge.memory.offload import Lanes
from traceforge.memory.pinned import Slab, aligned


@dataclass
class _Window:
    """Parameters that are updated together, and where their moments lie: first all means, then all squares."""

    group: dict[str, Any]
    parameters: list[nn.Parameter]
    start: int

    @property
    def num_weights(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def moments(self, block: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of each parameter's moments in a block of the window's size."""
        found: list[list[Tensor]] = []
        for half in block.chunk(2):
            parts = half.split([parameter.numel() for parameter in self.parameters])
            found.append([part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)])
        return found[0], found[1]


class OffloadedAdamW(torch.optim.Optimizer):
    """See the module. Its state dict is that of `torch.optim.AdamW`, so that a checkpoint of one extends the other.

    Args:
        groups: parameter groups with `params` and `weight_decay`; all on one device, in float32.
        lr, betas, eps: as in `torch.optim.AdamW`.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        device = self.param_groups[0]["params"][0].device
        self._lanes = Lanes(device)
        self._slab = Slab(device, "the optimizer's moments")
        self._windows: list[_Window] = []
        start = 0
        for group in self.param_groups:
            for members in _cut(group["params"]):
                window = _Window(group, members, start)
                self._windows.append(window)
                start += aligned(8 * window.num_weights)
        self._slab.reserve(start)

    def _on_host(self, window: _Window) -> Tensor:
        return self._slab.view(window.start, (2 * window.num_weights,), torch.float32)

    def _begin(self) -> None:
        """Enter zero moments of every parameter into the state."""
        for window in self._windows:
            host = self._on_host(window)
            host.zero_()
            for parameter, mean, square in zip(window.parameters, *window.moments(host), strict=True):
                self.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": mean, "exp_avg_sq": square}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None, "a closure would run the model again"
        if not self.state:
            self._begin()
        coming = self._bring(self._windows[0])
        leaving: list[tuple[Any, Tensor]] = []
        for number, window in enumerate(self._windows):
            block, event = coming
            if number + 1 < len(self._windows):
                coming = self._bring(self._windows[number + 1])
            self._lanes.wait(event)
            self._update(window, block)
            if leaving:  # a block may be given back only after its copy
                self._lanes.wait(leaving.pop()[0])
            leaving.append((self._lanes.to_host(self._on_host(window), block), block))
        self._lanes.wait(leaving.pop()[0])

    def _bring(self, window: _Window) -> tuple[Tensor, Any]:
        block = torch.empty(2 * window.num_weights, dtype=torch.float32, device=self._lanes.device)
        with self._lanes.towards_device():
            return block, self._lanes.to_device(block, self._on_host(window))

    def _update(self, window: _Window, block: Tensor) -> None:
        means, squares = window.moments(block)
        moved = [number for number, parameter in enumerate(window.parameters) if parameter.grad is not None]
        parameters = [window.parameters[number] for number in moved]
        if not parameters:
            return
        group = window.group
        adamw(
            list(parameters),
            [parameter.grad for parameter in parameters],
            [means[number] for number in moved],
            [squares[number] for number in moved],
            [],
            [self.state[parameter]["step"] for parameter in parameters],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class or of `torch.optim.AdamW`; the moments go to the host."""
        super().load_state_dict(state_dict)
        loaded = {parameter: dict(state) for parameter, state in self.state.items()}
        self.state.clear()
        if not loaded:
            return
        self._begin()
        for parameter, state in loaded.items():
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[parameter][name].copy_(state[name])
            self.state[parameter]["step"].fill_(float(state["step"]))
        self._rebind()

    def _rebind(self) -> None:
        """Point the windows at the groups that loading has made anew."""
        by_parameter = {id(p): group for group in self.param_groups for p in group["params"]}
        for window in self._windows:
            window.group = by_parameter[id(window.parameters[0])]


def _cut(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return runs of parameters of at most `WINDOW_WEIGHTS` weights, in order; a larger one is a run of its own."""
    windows: list[list[nn.Parameter]] = []
    held = 0
    for parameter in parameters:
        if not windows or held + parameter.numel() > WINDOW_WEIGHTS:
            windows.append([])
            held = 0
        windows[-1].append(parameter)
        held += parameter.numel()
    return windows
