"""Page-locked host memory: one slab of exact size with a budget.

torch's own pinned allocator rounds every block up to a power of two, which at tens of GiB is not affordable. Here an
ordinary block is registered with the driver, used by views, and given back when a larger one is needed.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from traceforge.errors import HostMemoryError

_PAGE = 4096


def aligned(num_bytes: int) -> int:
    """Return a size rounded up to whole pages."""
    return -(-num_bytes // _PAGE) * _PAGE


class Slab:
    """A block of host bytes that copies to and from the device can run beside computing.

    Args:
        device: the device it serves; for the CPU it is ordinary memory.
        purpose: what error messages call it.
        budget_bytes: most it may hold (None = no limit).
    """

    def __init__(self, device: torch.device, purpose: str, budget_bytes: int | None = None) -> None:
        self.device, self.purpose, self.budget_bytes = device, purpose, budget_bytes
        self._block = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._block.numel()

    def reserve(self, num_bytes: int) -> None:
        """Hold at least `num_bytes`. What the slab held is lost if it has to grow.

        Raises:
            HostMemoryError: over the budget, or the system does not give or lock so much.
        """
        wanted = aligned(num_bytes)
        if wanted <= self.num_bytes:
            return
        gib = f"{wanted / 2**30:.2f} GiB of host memory for {self.purpose}"
        if self.budget_bytes is not None and wanted > self.budget_bytes:
            raise HostMemoryError(
                f"{gib}: memory.pinned_gib allows {self.budget_bytes / 2**30:.2f}",
                hint="raise memory.pinned_gib, set memory.recompute_attention = true, or shorten the rows",
            )
        self.release()
        try:
            block = torch.empty(wanted + _PAGE, dtype=torch.uint8)
        except RuntimeError as error:
            raise HostMemoryError(f"{gib}: the system has not so much", hint=_WAY_OUT) from error
        start = -block.data_ptr() % _PAGE
        block = block[start : start + wanted]
        if self.device.type == "cuda":
            block.zero_()  # touched by all cores first: locking untouched pages goes one by one
            torch.cuda.synchronize(self.device)
            found = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), wanted, 0))
            if found != 0:
                raise HostMemoryError(f"{gib}: it cannot be page-locked (CUDA error {found})", hint=_WAY_OUT)
        self._block = block

    def release(self) -> None:
        """Give the memory back."""
        if self.device.type == "cuda" and self.num_bytes:
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())
        self._block = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver may be gone already when the process ends
            self.release()

    def view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor over the bytes from `start`."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        assert start + num_bytes <= self.num_bytes, "the slab was not reserved for this"
        return self._block[start : start + num_bytes].view(dtype).view(shape)

    def bytes(self) -> Tensor:
        """Return all of it as bytes: tests fill it with rubbish."""
        return self._block


_WAY_OUT = (
    "free host memory, raise the limit of locked memory (ulimit -l; on WSL also .wslconfig), set "
    "memory.recompute_attention = true, or shorten the rows"
)
