"""What a machine has, and what of it a run can count on."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30
CARD_RESERVE = int(0.9 * _GIB)
"""On a card beside what torch allocates: CUDA with its libraries, and what the allocator holds and cannot hand out."""
CPU_PROCESS = int(0.43 * _GIB)
"""Resident memory of Python with torch, transformers, peft and a tokenizer, before a model is loaded; measured."""
CUDA_PROCESS = 3 * _GIB
"""The same with the CUDA libraries; an allowance, not measured per machine."""


@dataclass(frozen=True)
class Budget:
    """Bytes; None = not known, and not checked.

    Args:
        device_bytes: of one card; of a run on the CPU, None.
        host_bytes: of the host.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None

    @classmethod
    def of_gib(cls, device_gib: float | None, host_gib: float | None) -> Budget:
        """Return the budget of sizes in GiB."""
        return cls(*(None if size is None else int(size * _GIB) for size in (device_gib, host_gib)))
