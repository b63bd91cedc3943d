"""`traceforge compare`: a run file through this project and through a standard trainer, side by side.

    run file ─▶ model, data, order ─┬─▶ oracle, on a copy of the network ─▶ TrainingTrace ─┐
                                    └─▶ our real loop ───────────────────▶ TrainingTrace ─┴─▶ compare.json, table

Alike      Tokens, masks, update lists, initial weights, optimizer and schedule (stretched over the compared updates).
Arithmetic float32 on both sides, whatever `model.dtype` says, and the output says so: narrower rounding would hide
           errors. Quantised weights, dropout, 8-bit AdamW, warm-up and branch-parallel pairs are refused by name.
Cost       The network twice in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console

from traceforge import __version__
from traceforge.config import MemorySettings, RunConfig, SimpoObjective
from traceforge.errors import DisagreementError, TraceForgeError, TrainingError, UsageError
from traceforge.evidence.recorder import create_run_folder
from traceforge.evidence.storage import to_json, write_whole
from traceforge.models.language_model import LanguageModel, load_language_model
from traceforge.models.load import ModelLocation, locate_model
from traceforge.oracles.accelerate import accelerate_sft
from traceforge.oracles.comparison_table import comparison_text
from traceforge.oracles.cpo import check_pairs, trl_simpo
from traceforge.oracles.our_run import trace_our_run
from traceforge.oracles.record import REAL_WEIGHTS, ConformanceRecord, compare_traces
from traceforge.oracles.trace import TrainingTrace, check_samples, check_settings, require, versions
from traceforge.oracles.trl import trl_sft
from traceforge.run_files import load_run_file
from traceforge.samples.branches import Pair
from traceforge.samples.dataset import load_samples
from traceforge.samples.pair_loading import load_pairs
from traceforge.samples.tokenizer import load_tokenizer
from traceforge.samples.tokens import Sample
from traceforge.training.methods import Item
from traceforge.training.order import UpdateOrder

OracleName = Literal["trl", "accelerate"]
FILE_NAME = "compare.json"

_MAY_DIFFER = ("objective", "optimizer", "schedule")
"""Sections that an oracle is told of; everything else is one and the same object on both sides."""

_PLANT = f"plant a difference in {', '.join(_MAY_DIFFER)}, for example --oracle-set objective.beta=3"


def _same_on_both_sides(section: str) -> str:
    return f"--oracle-set {section}: tokens, masks and weights are the same on both sides"


@dataclass(frozen=True)
class Comparison:
    """What a comparison came to and where its record lies."""

    folder: Path
    record: ConformanceRecord

    def as_dict(self) -> dict[str, Any]:
        """Return the record with its folder as JSON values, like the file: what is not finite is null, and listed."""
        values: dict[str, Any] = json.loads(to_json({"folder": str(self.folder), **self.record.as_dict()}))
        return values

    def describe(self) -> str:
        """Return the table that a person reads."""
        return f"{comparison_text(self.record)}\nrecord: {self.folder / FILE_NAME}"

    def require_agreement(self) -> None:
        """Do nothing if both sides did the same.

        Raises:
            DisagreementError: they did not; it names the checks that failed.
        """
        failed = self.record.failed_checks
        if failed:
            raise DisagreementError(
                f"this project and {self.record.figures['oracle']} disagree: {', '.join(failed)}",
                hint=f"{self.folder / FILE_NAME} has every figure and what was allowed",
            )


def compare(
    run_file: Path,
    *,
    oracle: str,
    updates: int,
    overrides: Sequence[str] = (),
    oracle_overrides: Sequence[str] = (),
    console: Console | None = None,
) -> Comparison:
    """Run both sides, save the record in a folder of its own and return it; a disagreement is in it, not raised.

    Args:
        oracle: `trl` (SFTTrainer, or CPOTrainer for `simpo`) or `accelerate` (`sft` only).
        overrides: `section.field=value` for both sides.
        oracle_overrides: for the oracle alone, on top: a difference planted on purpose, to see the comparison fail.
        console: where progress is shown; stderr if not given.

    Raises:
        UsageError: the oracle is not installed or has no word for a setting, a pair or a sample of this run.
        TraceForgeError: a side could not be run; the record then says so.
    """
    console = console or Console(stderr=True)
    asked = load_run_file(run_file, overrides)
    config = compared_settings(asked, updates=updates)
    for override in oracle_overrides:
        section = override.split(".", 1)[0].strip()
        if section not in _MAY_DIFFER:
            raise UsageError(_same_on_both_sides(section), hint=_PLANT)
    told = compared_settings(load_run_file(run_file, [*overrides, *oracle_overrides]), updates=updates)
    check_comparison(config, told, oracle)
    location = locate_model(config.model.name_or_path, config.model.revision)
    sets = _load_data(config, location)
    order = UpdateOrder(sets.train, items_per_update=config.items_per_update, seed=config.training.seed)
    lists = [items for _, _, items in islice(order.updates(passes=None), updates)]
    _check_items([item for items in lists for item in items])
    folder = create_run_folder(config.output_dir, f"compare-{config.run_name}")
    write_whole(folder / "run.json", to_json(config.model_dump(mode="json"), indent=2) + b"\n")
    setting = {
        "oracle": oracle,
        "oracle_overrides": list(oracle_overrides),
        "objective": {"ours": config.objective.model_dump(), "theirs": told.objective.model_dump()},
        "model": {"id": location.id, "resolved_commit": location.resolved_commit},
        "dtype": {"run_file": asked.model.dtype, "compared": config.model.dtype},
        "update_items": [[item.sample_id for item in items] for items in lists],
    }
    try:
        record = _run_both((config, told), (oracle, location), (order, lists), console)
    except Exception as error:
        known = _named(error)
        _save(folder, setting, _unfinished(known))
        raise known from error
    return Comparison(folder, _save(folder, setting, record))


def _save(folder: Path, setting: Mapping[str, Any], record: ConformanceRecord) -> ConformanceRecord:
    """Write the record, with what was compared among its figures, and return it so."""
    whole = replace(record, figures={**setting, **record.figures})
    write_whole(folder / FILE_NAME, to_json(whole.as_dict(), indent=2) + b"\n")
    return whole


def compared_settings(config: RunConfig, *, updates: int) -> RunConfig:
    """Return a run's settings as they are compared: in float32, over so many updates."""
    model = config.model.model_copy(update={"dtype": "float32"})
    training = config.training.model_copy(update={"updates": updates, "passes": None})
    return config.model_copy(update={"model": model, "training": training})


def check_comparison(config: RunConfig, told: RunConfig, oracle: str) -> None:
    """Refuse what the oracle cannot do, before anything is loaded.

    Raises:
        UsageError: it names the setting.
    """
    if oracle not in get_args(OracleName):
        raise UsageError(f"--with {oracle}: the oracles are {' and '.join(get_args(OracleName))}")
    others = [name for name in RunConfig.model_fields if name not in _MAY_DIFFER]
    differing = [name for name in others if getattr(config, name) != getattr(told, name)]
    if differing:
        raise UsageError(_same_on_both_sides(differing[0]), hint=_PLANT)
    method = config.objective.method
    if told.objective.method != method:
        raise UsageError(f"--oracle-set objective.method={told.objective.method}: the run's is {method!r}")
    if method not in {"sft", "simpo"}:
        raise UsageError(
            f"objective.method = {method!r} has no oracle here; sft and simpo have",
            hint="tests/equivalence proves it against plain torch",
        )
    if method == "simpo" and oracle == "accelerate":
        raise UsageError("--with accelerate runs sft only, objective.method is 'simpo'", hint="use --with trl")
    if config.model.quantization != "none":
        raise UsageError(
            f"model.quantization = {config.model.quantization!r}: the comparison needs float32 weights",
            hint="add --set model.quantization=none",
        )
    if config.adapter.dropout:
        raise UsageError(
            f"adapter.dropout = {config.adapter.dropout}: two trainers never draw the same one",
            hint="add --set adapter.dropout=0",
        )
    if config.parallel.pairs == "branch_parallel":
        raise UsageError(
            "parallel.pairs = 'branch_parallel': a comparison runs in one process",
            hint="add --set parallel.pairs=shared_prefix; tests/equivalence proves that both make the same update",
        )
    check_settings(told.optimizer, told.schedule)
    check_settings(config.optimizer, config.schedule)
    for library in ("trl", "datasets") if oracle == "trl" else ("accelerate",):
        require(library)


def _load_data(config: RunConfig, location: ModelLocation) -> Any:
    """Return the run's `SampleSets` or `PairSets`."""
    tokenizer = load_tokenizer(str(location.folder), template_file=config.model.template_file)
    load: Any = load_samples if config.objective.method == "sft" else load_pairs
    return load(config.data, tokenizer, template_kwargs=config.model.template_kwargs)


def _check_items(items: Sequence[Item]) -> None:
    check_pairs([item for item in items if isinstance(item, Pair)])
    check_samples([item for item in items if isinstance(item, Sample)])


def _run_both(
    settings: tuple[RunConfig, RunConfig],
    oracle: tuple[str, ModelLocation],
    work: tuple[UpdateOrder, Sequence[Sequence[Item]]],
    console: Console,
) -> ConformanceRecord:
    config, told = settings
    name, location = oracle
    order, lists = work
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = stock = load_language_model(config, location, device)
    if model.lean is not None:  # the oracle runs the network's own modules, whose weights the lean path moves away
        generic = config.model_copy(update={"memory": MemorySettings(path="generic")})
        stock = load_language_model(generic, location, device)
    num_updates = f"{len(lists)} update{'s' if len(lists) > 1 else ''}"
    console.print(f"{num_updates} by {name}, on a copy of the network", markup=False)
    theirs = run_oracle(name, stock, lists, told)
    console.print(f"{num_updates} by this project", markup=False)
    ours = trace_our_run(model, order, config, total_updates=len(lists))
    record = compare_traces(ours, theirs, REAL_WEIGHTS)
    return replace(record, figures={**record.figures, "device": str(device), "layout": model.effective_attention()})


def run_oracle(name: str, model: LanguageModel, lists: Sequence[Sequence[Any]], config: RunConfig) -> TrainingTrace:
    """Return what the oracle called `name` does with these update lists, on a copy of the model's network."""
    settings: dict[str, Any] = {"optimizer": config.optimizer, "schedule": config.schedule}
    if isinstance(config.objective, SimpoObjective):
        return trl_simpo(model.model, lists, objective=config.objective, **settings)
    if name == "trl":
        return trl_sft(model.model, lists, **settings)
    # Accelerate ends a window with a pass: each list is a pass of its own, so that updates may differ in size.
    return accelerate_sft(model.model, lists, samples_per_update=max(map(len, lists)), **settings)


def _named(error: Exception) -> TraceForgeError:
    if isinstance(error, TraceForgeError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return TrainingError(
            f"out of GPU memory: {str(error).splitlines()[0]}",
            hint="a comparison holds the network twice in float32, and the standard trainer all logits; lower "
            "data.max_tokens or use a smaller model",
        )
    return TrainingError(f"unexpected {type(error).__name__}: {error}", hint="run again with --debug for the traceback")


def _unfinished(error: TraceForgeError) -> ConformanceRecord:
    """Return the record of a comparison that could not be made."""
    return ConformanceRecord(
        status="failed",
        versions={"traceforge": __version__, **versions()},
        framework_paths={},
        checks={"both_sides_ran": False},
        figures={"failure": {"error_type": type(error).__name__, "message": error.message, "hint": error.hint}},
        tolerances={},
    )
