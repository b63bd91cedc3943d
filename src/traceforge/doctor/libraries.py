"""Versions: what this package asks for, and combinations that are known to break.

Each known fault has a public report; `Source` in its entry says which.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from traceforge.doctor.findings import Finding, Status

DISTRIBUTION = "traceforge-train"
_SHOWN = ("torch", "transformers", "peft", "bitsandbytes")


@dataclass(frozen=True)
class Stack:
    """What decides whether a combination is a known fault.

    Args:
        versions: installed distributions and their versions.
        cuda: CUDA version that torch was built for; None = a CPU build.
        capability: of the card, such as (8, 6); None = no card.
    """

    versions: Mapping[str, str]
    cuda: str | None = None
    capability: tuple[int, int] | None = None

    def version(self, distribution: str) -> Version | None:
        """Return an installed version, without its local part (`+cu128`)."""
        text = self.versions.get(distribution)
        return None if text is None else Version(Version(text).public)


@dataclass(frozen=True)
class KnownFault:
    """A combination that breaks; `Source` is where it was reported."""

    name: str
    applies: Callable[[Stack], bool]
    text: str
    way_out: str
    source: str


def _cublas_of_cuda_12_8(stack: Stack) -> bool:
    torch = stack.version("torch")
    cublas = stack.version("nvidia-cublas-cu12")
    return (
        torch is not None
        and Version("2.9") <= torch < Version("2.12")
        and (stack.cuda or "").startswith("12.8")
        and stack.capability is not None
        and stack.capability[0] == 8
        and (cublas is None or cublas < Version("12.9.1.4"))
    )


KNOWN_FAULTS = (
    KnownFault(
        "cublas",
        _cublas_of_cuda_12_8,
        "torch 2.9 to 2.11 with cuBLAS 12.8 on Ampere: bfloat16 and float16 products may fail with "
        "CUBLAS_STATUS_INVALID_VALUE",
        "pip install 'nvidia-cublas-cu12==12.9.1.4', and unset LD_LIBRARY_PATH",
        "pytorch/pytorch 174949, 170676",
    ),
    KnownFault(
        "pynvml",
        lambda stack: "pynvml" in stack.versions,
        "the distribution `pynvml` is installed; it is an old name, and hides what nvidia-ml-py provides",
        "pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py",
        "pypi.org/project/pynvml",
    ),
    KnownFault(
        "triton",
        lambda stack: stack.cuda is not None and not {"triton", "triton-windows"} & set(stack.versions),
        "torch is built for CUDA, but triton is missing: rows with many forks cannot take the block-sparse kernel",
        "pip install triton in the version that torch names in its requirements",
        "pytorch.org: torch requires triton on Linux",
    ),
)


def installed() -> dict[str, str]:
    """Return every installed distribution with its version."""
    return {
        re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version
        for each in metadata.distributions()
        if each.metadata["Name"]
    }


def look_at_libraries(stack: Stack, *, required: list[str] | None = None) -> list[Finding]:
    """Return one finding on the required versions, and one for each known fault that applies."""
    if required is None:
        try:
            required = metadata.requires(DISTRIBUTION) or []
        except metadata.PackageNotFoundError:  # run from a source tree that is not installed
            required = []
    wrong = _unfulfilled([Requirement(text) for text in required], stack)
    versions = ", ".join(f"{name} {stack.versions.get(name, 'missing')}" for name in _SHOWN)
    built_for = f"CUDA {stack.cuda}" if stack.cuda else "the CPU"
    figures = {name.replace("-", "_"): stack.versions.get(name) for name in _SHOWN} | {"cuda": stack.cuda}
    if wrong:
        way_out = "pip install " + " ".join(f"'{requirement}'" for requirement, _ in wrong)
        said = "; ".join(f"{requirement.name} is {found or 'missing'}" for requirement, found in wrong)
        status: Status = "fail" if any(found is None for _, found in wrong) else "warn"
        first = Finding("libraries", status, f"not what this version needs: {said}", way_out, figures)
    else:
        first = Finding("libraries", "pass", f"{versions}; torch is built for {built_for}", figures=figures)
    faults = [fault for fault in KNOWN_FAULTS if fault.applies(stack)]
    return [first, *(Finding(f"known: {each.name}", "warn", each.text, each.way_out) for each in faults)]


def _unfulfilled(requirements: list[Requirement], stack: Stack) -> list[tuple[Requirement, str | None]]:
    wrong = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = stack.versions.get(re.sub(r"[-_.]+", "-", requirement.name).lower())
        if found is None or not requirement.specifier.contains(Version(found).public, prereleases=True):
            wrong.append((requirement, found))
    return wrong
