"""The demo's stages, each timed: ingest, build, inspect, train, report; then the same for preference pairs.

First    SFT on bundled logs. Before it, once, the model is made.
Then     SimPO from the adapter that SFT left, on bundled pairs over the same runs.
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
from traceforge.evidence.run_record import EvaluationLine, load_run
from traceforge.evidence.schema import Evidence
from traceforge.run_files import load_run_file

SFT_FILE = Path(__file__).with_name("sft_demo_cpu.toml")
SIMPO_FILE = Path(__file__).with_name("simpo_demo_cpu.toml")
LOGS = Path(__file__).parent / "data" / "logs"
REPORTS = Path(__file__).parent / "data" / "reports"
PAIRS = Path(__file__).parent / "data" / "pairs.jsonl"


@dataclass(frozen=True)
class Trained:
    """One training run of the demo.

    Args:
        folder: the run.
        report: its page.
        inspection: the page of its data set.
        evidence: what the run recorded.
        evaluations: what was measured before, during and after.
    """

    folder: Path
    report: Path
    inspection: Path
    evidence: Evidence
    evaluations: tuple[EvaluationLine, ...]

    def measured(self, of_set: str) -> tuple[EvaluationLine, EvaluationLine]:
        """Return the first and the last measurement of `train` or `evaluation`."""
        lines = [line for line in self.evaluations if line.set == of_set]
        return lines[0], lines[-1]

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
        }

    def closing_lines(self) -> list[str]:
        """Return decision and paths."""
        return [
            f"decision: {self.evidence.decision}",
            *(f"  {reason}" for reason in self.evidence.decision_reasons),
            f"evidence: {self.folder / 'evidence.json'}",
            f"data:     {self.inspection}",
            f"report:   {self.report}",
        ]


@dataclass(frozen=True)
class DemoResult:
    """What the demo came to.

    Args:
        sft: the run on every turn of the logs.
        simpo: the run on preference pairs that went on from it.
        seconds: duration of each stage, in order.
    """

    sft: Trained
    simpo: Trained
    seconds: dict[str, float]

    @property
    def exit_code(self) -> int:
        """3 if a gate failed, else 0."""
        return 3 if "reject" in {self.sft.evidence.decision, self.simpo.evidence.decision} else 0

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values; preference means of a pair set stand under `held_out`, before and after."""
        held_out = [
            {"margin": line.margin, "accuracy": line.accuracy, "loss": line.loss}
            for line in self.simpo.measured("evaluation")
        ]
        return {
            "sft": self.sft.as_dict(),
            "simpo": {**self.simpo.as_dict(), "held_out": dict(zip(("before", "after"), held_out, strict=True))},
            "seconds": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
        }

    def describe(self) -> str:
        """Return losses, margins, decisions, times and paths in lines for a person."""
        peaks = (trained.evidence.mechanism_metrics.peak_host_bytes or 0 for trained in (self.sft, self.simpo))
        lines = [
            "",
            *_table(
                "SFT: loss in nats per trained token",
                self.sft,
                [("training samples", "train", "loss"), ("held-out samples", "evaluation", "loss")],
            ),
            *self.sft.closing_lines(),
            "",
            *_table(
                "SimPO from that adapter",
                self.simpo,
                [
                    ("training pairs, loss", "train", "loss"),
                    ("held-out pairs, loss", "evaluation", "loss"),
                    ("held-out pairs, margin", "evaluation", "margin"),
                    ("held-out pairs, right way round", "evaluation", "accuracy"),
                ],
            ),
            *self.simpo.closing_lines(),
            "",
            "where the time went:",
            *(f"  {name:<13} {seconds:7.1f} s" for name, seconds in self.seconds.items()),
            f"  in all        {sum(self.seconds.values()):7.1f} s, at most {max(peaks) / 2**30:.1f} GiB of memory",
        ]
        return "\n".join(lines)


def run_demo(output: Path, *, updates: int | None = None) -> DemoResult:
    """Go from the bundled logs to two adapters and their reports under `output` and return what came of it.

    Args:
        updates: of each run, instead of the number in its file.

    Raises:
        TraceForgeError: a stage failed; the message names it.
    """
    seconds: dict[str, float] = {}
    with _stage("model", seconds):
        config = _settings(SFT_FILE, output, updates, f"data.train={json.dumps(str(output / 'samples'))}")
        _say(f"{prepare_model(Path(config.model.name_or_path))}")
    with _stage("ingest", seconds):
        _ingest(output)
    with _stage("build", seconds):
        _build(output)
    with _stage("inspect", seconds):
        inspection = _inspect(output, config)
    sft = _train("", config, inspection, seconds)

    with _stage("build pairs", seconds):
        _build_pairs(output)
    config = _settings(
        SIMPO_FILE,
        output,
        updates,
        f"data.train={json.dumps(str(output / 'pairs'))}",
        f"adapter.init={json.dumps(str(sft.folder / 'adapter'))}",
    )
    with _stage("inspect pairs", seconds):
        inspection = _inspect_pairs(output, config)
    simpo = _train(" simpo", config, inspection, seconds)
    return DemoResult(sft, simpo, seconds)


def _settings(file: Path, output: Path, updates: int | None, *overrides: str) -> RunConfig:
    given = [f"output_dir={json.dumps(str(output))}", *overrides]
    if updates is not None:
        given.append(f"training.updates={updates}")
    return load_run_file(file, given)


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


def _build_pairs(output: Path) -> None:
    from traceforge.samples.pair_build import build_pairs

    _say(build_pairs(output / "trajectories", output / "pairs", explicit=[str(PAIRS)]).describe())


def _inspect(output: Path, config: RunConfig) -> Path:
    from traceforge.samples.inspection import inspect_dataset
    from traceforge.samples.inspection_views import summary_lines, write_inspection_html

    inspection = inspect_dataset(
        str(output / "samples"),
        model=config.model.name_or_path,
        settings=config.data,
        tokens_per_row=config.tokens_per_row,
    )
    _say_all(summary_lines(inspection))
    page = output / "samples.html"
    write_inspection_html(inspection, page)
    return page


def _inspect_pairs(output: Path, config: RunConfig) -> Path:
    from traceforge.samples.pair_inspection import inspect_pairs
    from traceforge.samples.pair_inspection_views import pair_summary_lines, write_pair_inspection_html

    inspection = inspect_pairs(str(output / "pairs"), model=config.model.name_or_path, settings=config.data)
    _say_all(pair_summary_lines(inspection))
    page = output / "pairs.html"
    write_pair_inspection_html(inspection, page)
    return page


def _train(what: str, config: RunConfig, inspection: Path, seconds: dict[str, float]) -> Trained:
    from traceforge.evidence.report import write_report
    from traceforge.training.run import run

    with _stage(f"train{what}", seconds):
        outcome = run(config)
    with _stage(f"report{what}", seconds):
        report = write_report(outcome.folder)
    return Trained(outcome.folder, report, inspection, outcome.evidence, load_run(outcome.folder).evaluations)


def _table(title: str, trained: Trained, rows: list[tuple[str, str, str]]) -> list[str]:
    """Return rows of `(label, set, field of EvaluationLine)`, each before and after, under a title."""
    lines = [f"{title:<36} {trained.evidence.baseline.name:>16}   {trained.evidence.candidate.name:>16}"]
    for label, of_set, field in rows:
        numbers = (getattr(line, field) for line in trained.measured(of_set))
        shown = (_number(value, share=field == "accuracy") for value in numbers)
        lines.append(f"  {label:<34} " + "   ".join(f"{text:>16}" for text in shown))
    return lines


@contextmanager
def _stage(name: str, seconds: dict[str, float]) -> Iterator[None]:
    sys.stderr.write(f"== {name}\n")
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def _say_all(lines: list[tuple[str, str]]) -> None:
    for label, text in lines:
        _say(f"{label:<22}{text}")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _number(value: float | None, *, share: bool) -> str:
    if value is None:
        return "not measured"
    return f"{value:.0%}" if share else f"{value:.4f}"
