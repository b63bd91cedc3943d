"""The demo's five stages, each timed: ingest, build, inspect, train, report (and before them, once, the model).

Again    Rerunning replaces what was ingested and built with the same; each training run gets a folder of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceforge.config import RunConfig
from traceforge.demo.model import prepare_model
from traceforge.evidence.schema import Evidence
from traceforge.run_files import load_run_file

RUN_FILE = Path(__file__).with_name("sft_demo_cpu.toml")
LOGS = Path(__file__).parent / "data" / "logs"
REPORTS = Path(__file__).parent / "data" / "reports"


@dataclass(frozen=True)
class DemoResult:
    """What the demo came to.

    Args:
        folder: the training run.
        report: its page.
        inspection: the page of the data set.
        evidence: what the run recorded.
        seconds: duration of each stage, in order.
    """

    folder: Path
    report: Path
    inspection: Path
    evidence: Evidence
    seconds: dict[str, float]

    @property
    def exit_code(self) -> int:
        """3 if a gate failed, else 0."""
        return 3 if self.evidence.decision == "reject" else 0

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "folder": str(self.folder),
            "report": str(self.report),
            "inspection": str(self.inspection),
            "decision": self.evidence.decision,
            "reasons": list(self.evidence.decision_reasons),
            "baseline": self.evidence.baseline.model_dump(),
            "candidate": self.evidence.candidate.model_dump(),
            "peak_host_bytes": self.evidence.mechanism_metrics.peak_host_bytes,
            "seconds": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
        }

    def describe(self) -> str:
        """Return losses, decision, times and paths in lines for a person."""
        before, after = self.evidence.baseline, self.evidence.candidate
        peak = self.evidence.mechanism_metrics.peak_host_bytes or 0
        lines = [
            "",
            f"loss in nats per trained token   {before.name:>16}   {after.name:>16}",
            f"  training samples               {_loss(before.train_loss):>16}   {_loss(after.train_loss):>16}",
            f"  held-out samples               {_loss(before.evaluation_loss):>16}   "
            f"{_loss(after.evaluation_loss):>16}",
            f"decision: {self.evidence.decision}",
            *(f"  {reason}" for reason in self.evidence.decision_reasons),
            "where the time went:",
            *(f"  {name:<8} {seconds:7.1f} s" for name, seconds in self.seconds.items()),
            f"  in all   {sum(self.seconds.values()):7.1f} s, at most {peak / 2**30:.1f} GiB of memory",
            f"evidence: {self.folder / 'evidence.json'}",
            f"samples:  {self.inspection}",
            f"report:   {self.report}",
        ]
        return "\n".join(lines)


def run_demo(output: Path, *, updates: int | None = None) -> DemoResult:
    """Go from the bundled logs to a report under `output` and return what came of it.

    Args:
        updates: instead of the run file's number.

    Raises:
        TraceForgeError: a stage failed; the message names it.
    """
    seconds: dict[str, float] = {}
    with _stage("model", seconds):
        config = _settings(output, updates)
        model = prepare_model(Path(config.model.name_or_path))
        _say(f"{model}")
    with _stage("ingest", seconds):
        _ingest(output)
    with _stage("build", seconds):
        _build(output)
    with _stage("inspect", seconds):
        inspection = _inspect(output, config)
    with _stage("train", seconds):
        from traceforge.training.run import run

        outcome = run(config)
    with _stage("report", seconds):
        from traceforge.evidence.report import write_report

        report = write_report(outcome.folder)
    return DemoResult(outcome.folder, report, inspection, outcome.evidence, seconds)


def _settings(output: Path, updates: int | None) -> RunConfig:
    overrides = [f"data.train={json.dumps(str(output / 'samples'))}", f"output_dir={json.dumps(str(output))}"]
    if updates is not None:
        overrides.append(f"training.updates={updates}")
    return load_run_file(RUN_FILE, overrides)


def _ingest(output: Path) -> None:
    from traceforge.trajectories.ingest import ingest

    counts = ingest([str(LOGS)], output / "trajectories", labels=[str(REPORTS)]).counts
    _say(
        f"{counts.trajectories} trajectories, {counts.turns} turns, {counts.with_reasoning} of them with reasoning, "
        f"{counts.resolved} tasks solved, {counts.refused} refused: {output / 'trajectories'}"
    )


def _build(output: Path) -> None:
    from traceforge.samples.build import build_sft

    _say(build_sft(output / "trajectories", output / "samples").describe())


def _inspect(output: Path, config: RunConfig) -> Path:
    from traceforge.samples.inspection import inspect_dataset
    from traceforge.samples.inspection_views import summary_lines, write_inspection_html

    samples = str(output / "samples")
    inspection = inspect_dataset(samples, model=config.model.name_or_path, settings=config.data)
    for label, text in summary_lines(inspection):
        _say(f"{label:<22}{text}")
    page = output / "samples.html"
    write_inspection_html(inspection, page)
    return page


@contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    sys.stderr.write(f"== {name}\n")
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
