"""The examination: which checks are made, in which order, in the full and in the short form.

Short    what decides whether a run can start: versions, card, memory, disk, one linear. A second or two.
Full     also what decides how fast it goes: attention kernels, 4-bit linears, copies, ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from traceforge.doctor.attention import look_at_attention
from traceforge.doctor.cards import CudaCard, cuda_cards, look_at_cards
from traceforge.doctor.findings import Examination, Finding, guarded
from traceforge.doctor.four_bit import look_at_four_bit
from traceforge.doctor.group import look_at_group
from traceforge.doctor.host import look_at_disk, look_at_memory, look_at_processor
from traceforge.doctor.libraries import Stack, installed, look_at_libraries
from traceforge.doctor.linears import look_at_linears
from traceforge.doctor.transfers import look_at_transfers
from traceforge.errors import MachineError

_REPORT = "run `traceforge doctor --debug` and report it"
_ISSUE = "reinstall torch and bitsandbytes for this machine"


def examine(
    *,
    short: bool = False,
    output_dir: Path = Path("runs"),
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16),
    device: torch.device | None = None,
) -> Examination:
    """Look at this machine and return what was found.

    Args:
        short: only what decides whether a run can start.
        output_dir: where runs are written.
        dtypes: of the arithmetic that is tried.
        device: None = the first card, or the CPU without one.
    """
    started = time.perf_counter()
    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cards = cuda_cards()
    capability = cards[0].capability if cards else None
    findings = [
        guarded("processor", look_at_processor, way_out=_REPORT),
        guarded("memory", look_at_memory, way_out=_REPORT),
        guarded(
            "disk", lambda: look_at_disk(output_dir), way_out="set output_dir to a folder on a disk of this machine"
        ),
        *look_at_libraries(Stack(installed(), torch.version.cuda, capability)),
        *look_at_cards(cards, cuda_build=torch.version.cuda, visible=os.environ.get("CUDA_VISIBLE_DEVICES")),
    ]
    linears, library = _linears(device, _supported(dtypes, cards))
    findings += linears
    if not short:
        findings += [guarded(name, look, way_out=_ISSUE) for name, look in _speed_checks(device, dtypes, cards)]
    return Examination(tuple(findings), time.perf_counter() - started, short, library)


def require_fit_to_run(found: Examination) -> None:
    """Raise the first failure that no run can start with: a product that is refused or wrong, a disk that is full.

    Other failures are told and recorded: a run on the CPU beside a card that cannot be used is slow, not wrong.

    Raises:
        MachineError: there is one.
    """
    for finding in found.failures:
        if finding.name == "disk" or finding.name.endswith(" linear"):
            raise MachineError(f"{finding.name}: {finding.text}", hint=finding.way_out)


def _linears(device: torch.device, dtypes: Sequence[torch.dtype]) -> tuple[list[Finding], str | None]:
    findings = []
    library = "cublas" if device.type == "cuda" else None
    for dtype in dtypes:
        finding, chosen = look_at_linears(device, dtype)
        findings.append(finding)
        library = "cublaslt" if "cublaslt" in (library, chosen) else library
    return findings, library


def _supported(dtypes: Sequence[torch.dtype], cards: Sequence[CudaCard]) -> list[torch.dtype]:
    old = bool(cards) and cards[0].capability < (8, 0)
    return [dtype for dtype in dtypes if not (old and dtype == torch.bfloat16)]


def _speed_checks(
    device: torch.device, dtypes: Sequence[torch.dtype], cards: Sequence[CudaCard]
) -> list[tuple[str, Callable[[], Finding]]]:
    narrow = _supported(dtypes, cards)
    dtype = narrow[0] if device.type == "cuda" and narrow else torch.float32
    return [
        ("attention", lambda: look_at_attention(device, dtype)),
        ("4-bit", lambda: look_at_four_bit(device, dtype)),
        ("copies", lambda: look_at_transfers(device)),
        ("ranks", look_at_group),
    ]
