"""Cards: driver, CUDA, memory, link; and whether torch can use what the driver has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from traceforge.doctor.findings import Finding
from traceforge.monitor.readings import Card, MonitorError, Source
from traceforge.monitor.sources import open_source

_GIB = 2**30
_CPU_IS_FOR = "the demo and models of up to about 1B parameters train on the CPU; for more use a machine with a card"
_SEE_TORCH = "install the torch build for your CUDA version, see pytorch.org/get-started"
_FREE_SHARE = 0.9


@dataclass(frozen=True)
class CudaCard:
    """A card as torch sees it: bytes free and in all, and its compute capability."""

    name: str
    uuid: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


def cuda_cards() -> list[CudaCard]:
    """Return the cards that torch may use."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        found.append(CudaCard(properties.name, str(properties.uuid), capability, total, free))
    return found


def look_at_cards(
    usable: Sequence[CudaCard],
    *,
    cuda_build: str | None,
    visible: str | None = None,
    opener: Callable[[], tuple[Source, list[Card]]] = open_source,
) -> list[Finding]:
    """Return the driver, and each card that torch may use; without any, why that is so.

    Args:
        cuda_build: CUDA version that torch was built for; None = a CPU build.
        visible: CUDA_VISIBLE_DEVICES; None = not set.
    """
    try:
        source, cards = opener()
    except MonitorError as error:
        return [_without_driver(error.message, usable, cuda_build), *(_usable(card, None) for card in usable)]
    source.close()
    whole = [card for card in cards if card.mig_of is None]
    driver = whole[0].driver if whole else None
    text = f"driver {driver}, {len(whole)} card{'s' if len(whole) != 1 else ''}, read through {source.name}"
    figures = {"driver": driver, "cards": len(whole), "source": source.name, "cuda_build": cuda_build}
    if usable:
        by_uuid = {card.uuid.removeprefix("GPU-"): card for card in cards}
        return [
            Finding("driver", "pass", f"{text}; torch is built for CUDA {cuda_build}", figures=figures),
            *(_usable(card, by_uuid.get(card.uuid.removeprefix("GPU-"))) for card in usable),
        ]
    if visible is not None and not visible.strip().lstrip("-1"):
        hidden = f"{text}, all hidden by CUDA_VISIBLE_DEVICES={visible!r}: runs go on the CPU"
        return [Finding("driver", "warn", hidden, "unset CUDA_VISIBLE_DEVICES to use them", figures)]
    if cuda_build is None:
        return [Finding("driver", "fail", f"{text}, but this torch is a CPU build", _SEE_TORCH, figures)]
    way_out = (
        f"check CUDA_VISIBLE_DEVICES; if it is not set, update the driver to one for CUDA {cuda_build}, "
        "or install a torch build for an older CUDA"
    )
    return [Finding("driver", "fail", f"{text}, but torch can use none of them", way_out, figures)]


def _without_driver(said: str, usable: Sequence[CudaCard], cuda_build: str | None) -> Finding:
    figures = {"driver": None, "cuda_build": cuda_build}
    if usable:
        way_out = "pip install nvidia-ml-py, so that runs can say what their cards did"
        return Finding("driver", "warn", f"torch has {len(usable)} cards, but none can be watched: {said}", way_out)
    if cuda_build is None:
        text = f"no card: {said}; torch is a CPU build, and runs go on the CPU"
        return Finding("card", "warn", text, _CPU_IS_FOR, figures)
    text = f"torch is built for CUDA {cuda_build}, but there is no driver: {said}; runs go on the CPU"
    return Finding("card", "warn", text, f"install the NVIDIA driver; without a card: {_CPU_IS_FOR}", figures)


def _usable(card: CudaCard, told: Card | None) -> Finding:
    major, minor = card.capability
    link = f", PCIe {told.pcie_link}" if told is not None and told.pcie_link else ""
    text = (
        f"{card.name}, capability {major}.{minor}, {card.free_bytes / _GIB:.1f} GiB free of "
        f"{card.total_bytes / _GIB:.1f}{link}"
    )
    figures = {
        "name": card.name,
        "capability": f"{major}.{minor}",
        "free_bytes": card.free_bytes,
        "total_bytes": card.total_bytes,
        "pcie_link": told.pcie_link if told is not None else None,
    }
    if card.capability < (8, 0):
        way_out = "set model.dtype = 'float16': bfloat16 needs capability 8.0 (Ampere) or newer"
        return Finding("card", "warn", f"{text}; no bfloat16", way_out, figures)
    if card.free_bytes < _FREE_SHARE * card.total_bytes:
        way_out = "see `nvidia-smi` for who holds the rest; `traceforge plan` counts on a free card"
        return Finding("card", "warn", f"{text}: other programs are on it", way_out, figures)
    return Finding("card", "pass", text, figures=figures)
