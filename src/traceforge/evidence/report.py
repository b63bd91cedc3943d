"""report.html: one self-contained page from the files of a run folder.

Offline  No script, no request: styles and charts stand in the page, and its content policy forbids the rest.
Escaped  Everything that came from a log, a model or an error is text, never markup.
Partial  A failed, killed or dry run gets the same page with the sections it has something for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

import traceforge
from traceforge.evidence import figures, formats, verdict_views, views
from traceforge.evidence.masks import mask_views
from traceforge.evidence.run_record import RunRecord, load_run
from traceforge.evidence.storage import write_whole
from traceforge.evidence.summaries import summarize_updates
from traceforge.pages import page_environment

_TEMPLATES = Path(__file__).parent / "templates"
_FILTERS = (
    formats.integer,
    formats.loss,
    formats.change,
    formats.change_percent,
    formats.share,
    formats.size,
    formats.duration,
    formats.moment,
    formats.compact,
    formats.plain,
    formats.clip,
    views.facts,
    views.hardware_facts,
    views.identity_facts,
    views.technique_facts,
    views.mechanism_facts,
    views.monitor_facts,
    views.planned_facts,
    views.preflight_facts,
    verdict_views.evaluation_words,
)


def write_report(run_folder: Path) -> Path:
    """Write `run_folder/report.html` from the files beside it and return its path.

    Raises:
        InputError: the folder is no run folder, or one of its files is not what a run writes.
        StorageError: the page cannot be written.
    """
    path = run_folder / "report.html"
    write_whole(path, render(load_run(run_folder)).encode())
    return path


def render(run: RunRecord) -> str:
    """Return the page of a run."""
    return _environment().get_template("report.html.j2").render(_page(run))


def _page(run: RunRecord) -> dict[str, Any]:
    evidence = run.evidence
    device = "host" if evidence is None or evidence.hardware.device == "cpu" else "device"
    summary = summarize_updates(run.updates)
    drawn = {
        "loss": figures.loss_figure(run),
        "learning_rate": figures.learning_rate_figure(run),
        "gradient_norm": figures.gradient_norm_figure(run),
        "seconds": figures.seconds_figure(run, median=summary.median_s),
        "memory": figures.memory_figure(run, where=device),
        "accuracy": figures.accuracy_figure(run),
        "margin": figures.margin_figure(run),
        "sides": figures.sides_figure(run),
    }
    evaluations = verdict_views.evaluation_rows(run.evaluations)
    return {
        "run": run,
        "evidence": evidence,
        "title": formats.clip(verdict_views.run_title(run), 200),
        "headline": verdict_views.headline(evidence),
        "is_dry_run": evidence is not None and evidence.run_mode == "dry_run",
        "loss_rows": [] if evidence is None else verdict_views.loss_rows(evidence),
        "check_rows": [] if evidence is None else verdict_views.check_rows(evidence),
        "figures": drawn,
        "summary": summary,
        "evaluations": evaluations,
        "preference_rows": verdict_views.preference_rows(run.evaluations),
        "shown_evaluations": verdict_views.thinned(evaluations),
        "dataset": views.dataset_view(run.manifest),
        "masks": mask_views(run.samples),
        "settings": views.settings_sections(run.config),
        "version": traceforge.__version__,
    }


def _environment() -> Environment:
    environment = page_environment(_TEMPLATES)
    for write in _FILTERS:
        environment.filters[write.__name__] = write
    environment.filters["drawn"] = Markup  # only for SVG that charts.py made and the style sheet of this package
    environment.globals["stylesheet"] = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    return environment
