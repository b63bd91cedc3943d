"""Vocabulary tables (embedding, output layer) that lie on the host: a row reads few of their rows, and once.

Cost     Saves V x D values on the device per table. An embedding's rows are read over the bus as they are needed
         (Triton reads page-locked memory in place; without it the host gathers them first); the output layer comes
         whole for the time in which a row's log-probabilities are formed.
Identity Bitwise: copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from traceforge.memory.layer_maths import kernels_for
from traceforge.memory.offload import Lanes
from traceforge.memory.pinned import Slab


class HostTable:
    """A frozen table [V, D].

    Args:
        table_VD: the table where it was loaded.
        device: where its rows are wanted.
        to_host: move it to page-locked host memory; otherwise it stays, and reading is plain indexing.
        purpose: what errors call it.
    """

    def __init__(self, table_VD: Tensor, device: torch.device, *, to_host: bool, purpose: str) -> None:
        self.device = device
        self._slab: Slab | None = None
        self._coming: tuple[Tensor, Any] | None = None
        self._lanes: Lanes | None = None
        self._table_VD = table_VD.detach()
        if to_host:
            self._slab = Slab(device, purpose)
            self._slab.reserve(table_VD.numel() * table_VD.element_size())
            self._table_VD = self._slab.view(0, tuple(table_VD.shape), table_VD.dtype)
            self._table_VD.copy_(table_VD.detach())

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked memory it holds."""
        return 0 if self._slab is None else self._slab.num_bytes

    def rows(self, ids_T: Tensor) -> Tensor:
        """Return the rows [T, D] of these ids on the device."""
        if self._slab is None:
            return torch.nn.functional.embedding(ids_T, self._table_VD)
        out_TD = torch.empty(ids_T.shape[0], self._table_VD.shape[1], dtype=self._table_VD.dtype, device=self.device)
        if (kernels := kernels_for(out_TD)) is not None:
            kernels.gather_rows(self._table_VD, ids_T, out_TD)
        else:
            out_TD.copy_(torch.nn.functional.embedding(ids_T.cpu(), self._table_VD))
        return out_TD

    def prefetch(self, lanes: Lanes) -> None:
        """Start to bring the whole table to the device, for the next `whole`."""
        if self._slab is None or self._coming is not None:
            return
        target = torch.empty_like(self._table_VD, device=self.device)
        with lanes.towards_device():
            self._coming = target, lanes.to_device(target, self._table_VD)
        self._lanes = lanes

    def whole(self) -> Tensor:
        """Return the table on the device, for a short time."""
        if self._coming is None or self._lanes is None:
            return self._table_VD.to(self.device, non_blocking=True)
        (target, event), self._coming = self._coming, None
        self._lanes.wait(event)
        return target
