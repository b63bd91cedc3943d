"""Measuring a finished run again: its adapter on its own fixed sets, beside what the run recorded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from traceforge.config import RunConfig
from traceforge.errors import InputError
from traceforge.evidence.recorder import RunRecord, load_run
from traceforge.models.language_model import load_language_model
from traceforge.models.load import locate_model
from traceforge.run_files import parse_run
from traceforge.samples.tokenizer import load_tokenizer
from traceforge.training.checkpoint import read_checkpoint
from traceforge.training.evaluation import EvaluationResult, evaluate, fixed_sets
from traceforge.training.methods import load_sets, method_of


@dataclass(frozen=True)
class SetMeasuredAgain:
    """One set: the loss now and the loss that the run recorded after its last update, in nats per token."""

    name: str
    loss: float
    recorded_loss: float | None
    trained_tokens: int
    rows: int
    rows_without_targets: int


@dataclass(frozen=True)
class MeasuredAgain:
    """All sets of a run, measured again."""

    folder: str
    sets: tuple[SetMeasuredAgain, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def describe(self) -> str:
        """Return a line per set."""
        lines = [f"{self.folder}, token-weighted loss in nats:"]
        for each in self.sets:
            before = "not recorded" if each.recorded_loss is None else f"{each.recorded_loss:.6f}"
            lines.append(
                f"  {each.name}: {each.loss:.6f} now, {before} in the run "
                f"({each.trained_tokens:,} trained tokens in {each.rows} samples)"
            )
        return "\n".join(lines)


def evaluate_again(run_folder: Path) -> MeasuredAgain:
    """Load what a run saved and evaluate it on the run's fixed sets.

    Raises:
        InputError: the folder is no finished run, or its data have changed since.
    """
    record = load_run(run_folder)
    config = _config_of_result(run_folder, record)
    location = locate_model(config.model.name_or_path, config.model.revision)
    tokenizer = load_tokenizer(str(location.folder), template_file=config.model.template_file)
    sets = load_sets(config, tokenizer)
    recorded = record.evidence.dataset.train_ids_hash if record.evidence else None
    if recorded is not None and recorded != sets.statistics.train_ids_hash:
        raise InputError(f"{run_folder}: the data now give other training samples than in the run")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_language_model(config, location, device)
    method = method_of(config)
    if config.objective.method == "dpo":
        method.restore(read_checkpoint(run_folder).state["method"])
    measured = {
        name: evaluate(model, items, tokens_per_row=config.tokens_per_row, method=method, name=name)
        for name, items in fixed_sets(config, sets).items()
    }
    return MeasuredAgain(str(run_folder), tuple(_beside(name, found, record) for name, found in measured.items()))


def _config_of_result(run_folder: Path, record: RunRecord) -> RunConfig:
    if record.config is None or record.evidence is None:
        raise InputError(f"{run_folder}: not a finished run (no run.json or evidence.json)")
    raw = dict(record.config)
    if (run_folder / "adapter").is_dir():
        raw["adapter"] = {**raw["adapter"], "init": str(run_folder / "adapter")}
    elif (run_folder / "model").is_dir():
        raw["model"] = {**raw["model"], "name_or_path": str(run_folder / "model"), "revision": None}
    else:
        raise InputError(f"{run_folder}: the run saved no adapter and no model", hint="its evidence.json says why")
    return parse_run(raw, source=str(run_folder / "run.json"))


def _beside(name: str, found: EvaluationResult, record: RunRecord) -> SetMeasuredAgain:
    losses = [line.loss for line in record.evaluations if line.set == name]
    return SetMeasuredAgain(
        name, found.loss, losses[-1] if losses else None, found.trained_tokens, found.rows, found.rows_without_targets
    )
