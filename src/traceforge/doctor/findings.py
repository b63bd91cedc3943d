"""What was looked at: one finding each, with the way out where something is not well."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail"]

_WIDTH = 16


@dataclass(frozen=True)
class Finding:
    """One line.

    Args:
        name: what was looked at, in a word or two.
        status: `fail` = runs will fail; `warn` = they will go, slower or with less than the machine has.
        text: what was found.
        way_out: what to do; every `warn` and `fail` has one.
        figures: the same as JSON values, for `--json`; units stand in the names.
    """

    name: str
    status: Status
    text: str
    way_out: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.status == "pass" or self.way_out, f"{self.name}: what is not well has a way out"

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "name": self.name,
            "status": self.status,
            "text": self.text,
            "way_out": self.way_out,
            "figures": dict(self.figures),
        }


@dataclass(frozen=True)
class Examination:
    """All findings, in the order in which they were made, and how long it took.

    Args:
        blas_library: what matrix products go through from here on (`cublas`, `cublaslt`); None on the CPU.
    """

    findings: tuple[Finding, ...]
    seconds: float
    short: bool = False
    blas_library: str | None = None

    @property
    def failures(self) -> list[Finding]:
        """What makes runs fail."""
        return [finding for finding in self.findings if finding.status == "fail"]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        counts = {status: sum(each.status == status for each in self.findings) for status in ("pass", "warn", "fail")}
        return {
            "form": "short" if self.short else "full",
            "counts": counts,
            "blas_library": self.blas_library,
            "findings": [finding.as_dict() for finding in self.findings],
            "seconds": round(self.seconds, 2),
        }

    def describe(self) -> str:
        """Return the lines for a person."""
        counts = self.as_dict()["counts"]
        lines = [line for finding in self.findings for line in _lines(finding)]
        return "\n".join([*lines, "", f"{counts['fail']} failed, {counts['warn']} warned, {counts['pass']} passed "
                          f"in {self.seconds:.1f} s"])  # fmt: skip


def _lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.status:<5} {finding.name:<{_WIDTH}} {finding.text}"
    if finding.way_out is not None:
        yield f"{'':<6}{'':<{_WIDTH}} way out: {finding.way_out}"


def guarded(name: str, look: Callable[[], Finding], *, way_out: str) -> Finding:
    """Return what `look` finds; if it breaks, that is the finding, and the others are still made."""
    try:
        return look()
    except Exception as error:  # a check that breaks is a result, not the end of the examination
        first = (str(error).strip().splitlines() or [""])[0]
        return Finding(name, "fail", f"{type(error).__name__}: {first}", way_out)


def seconds_of(work: Callable[[], object], *, repeats: int, wait: Callable[[], object]) -> float:
    """Return the shortest time of one `work` in seconds, after one that is not counted; `wait` ends pending work."""
    work()
    wait()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return min(times)
