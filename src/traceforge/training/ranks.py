"""A run on several ranks of this host, seen from the process that starts them: it has the run folder and the last word.

The ranks carry out the run (`run.py`); rank 0 writes its evidence. When a rank ends before its time, this process says
which, where and why: in the evidence that rank 0 has left, or in evidence made from the files of the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from traceforge.config import RunConfig
from traceforge.errors import DisagreementError, RankError
from traceforge.evidence.rank_record import RankRecord, read_rank_record
from traceforge.evidence.recorder import RunRecorder, create_run_folder, load_run
from traceforge.evidence.report import write_report
from traceforge.evidence.run_record import RunRecord
from traceforge.evidence.schema import Candidate, Evidence, Failure, Losses, Verdict, decide
from traceforge.parallel.child import RUN_FOLDER
from traceforge.parallel.devices import choose_devices, visible_devices
from traceforge.parallel.launch import GRACE_S, RankEnd, RanksEnded, start_ranks
from traceforge.training.attempt import Attempt
from traceforge.training.interrupts import Interrupted

_CONSEQUENCES = {"RankLostError", "Interrupted"}
"""Failures of ranks that are well themselves: they lost another one, or were told to stop because of it."""


@dataclass(frozen=True)
class _Cause:
    """The end that ended the run, and what that rank had last written."""

    end: RankEnd
    record: RankRecord | None

    @property
    def own_failure(self) -> Failure | None:
        return self.record.failure if self.record is not None else None


def run_on_ranks(
    config: RunConfig, arguments: Sequence[str], *, num_ranks: int | None, gpus: str | None, grace_s: float = GRACE_S
) -> Evidence:
    """Carry out a run on several ranks and return its evidence.

    Args:
        config: the run, as the ranks will read it.
        arguments: of the command line `traceforge` that each rank runs.
        num_ranks: how many; None = one for each of `gpus`.
        gpus: see `choose_devices`; None = the first ones, or the CPU where there are none.
        grace_s: how long the others may take to end after a rank has.

    Raises:
        ConfigError: the devices cannot be had.
        RankError: a rank failed; it has that rank's exit code if the rank gave one, and evidence.json says the rest.
        Interrupted: the run was asked to stop.
    """
    devices = choose_devices(
        num_ranks=num_ranks,
        gpus=gpus,
        visible=visible_devices(os.environ),
        num_gpus=torch.cuda.device_count(),
        shared=config.parallel.shared_device,
    )
    folder = create_run_folder(config.output_dir, config.run_name)
    ended = start_ranks(
        [sys.executable, "-m", "traceforge", *arguments],
        devices=devices,
        logs=folder / "logs",
        environment={RUN_FOLDER: str(folder)},
        grace_s=grace_s,
    )
    return conclude(config, folder, ended)


def conclude(config: RunConfig, folder: Path, ended: RanksEnded) -> Evidence:
    """Return the evidence of ranks that have ended well; of others make it say what happened, and raise that.

    Raises:
        RankError: a rank failed.
        Interrupted: the run was asked to stop.
    """
    left = load_run(folder) if any(folder.glob("*.json")) else RunRecord(folder)
    if left.evidence is not None and left.evidence.failure is None and _by_themselves(left.evidence, ended):
        return left.evidence
    if ended.signal_number is not None:
        failure = _interrupted(folder, left, ended.signal_number)
        code = 128 + ended.signal_number
    elif not ended.failures:
        raise RankError(f"{folder}: the ranks ended without evidence", hint=f"see {folder / 'logs'}")
    else:
        cause = _first_cause(folder, ended.failures)
        by_rank_0 = left.evidence.failure if left.evidence is not None and cause.end.rank == 0 else None
        failure = by_rank_0 or _failure_of(folder, cause)
        code = cause.end.exit_code if (by_rank_0 or cause.own_failure) and cause.end.exit_code > 0 else 1
    if left.evidence is None or left.evidence.failure != failure:
        _rewrite(config, folder, left, failure)
    if failure.error_type == "Interrupted":
        raise Interrupted(failure.message, number=code - 128, hint=failure.hint or "start it again")
    error = RankError(failure.message, hint=failure.hint)
    error.exit_code = code
    raise error


def _by_themselves(evidence: Evidence, ended: RanksEnded) -> bool:
    """Return whether the ranks came to the end of the run; a failed gate gives each of them exit code 3."""
    first = [end.exit_code for end in ended.failures if end.first]
    gate_failed = evidence.decision == "reject" and set(first) == {DisagreementError.exit_code}
    return ended.signal_number is None and (not ended.failures or gate_failed)


def _first_cause(folder: Path, failures: Sequence[RankEnd]) -> _Cause:
    """Return the end that the others followed from: one that came first, and least likely a consequence itself."""
    causes = [_Cause(end, read_rank_record(folder, end.rank)) for end in failures]

    def order(cause: _Cause) -> tuple[bool, bool, bool, int]:
        said = cause.own_failure
        follows = said is not None and said.error_type in _CONSEQUENCES
        return (not cause.end.first, follows, said is not None, cause.end.rank)

    return min(causes, key=order)


def _failure_of(folder: Path, cause: _Cause) -> Failure:
    end, said = cause.end, cause.own_failure
    log = folder / "logs" / f"rank{end.rank}.log"
    if said is not None:
        message = said.message if said.message.startswith(f"rank {end.rank} ") else f"rank {end.rank}: {said.message}"
        return said.model_copy(update={"message": message, "rank": end.rank, "exit_code": end.exit_code})
    stage = cause.record.stage if cause.record is not None else "environment_preflight"
    return Failure(
        stage=stage,
        error_type="RankError",
        message=f"rank {end.rank} (process {end.pid}) ended at {stage}: {end.cause}",
        hint=f"its last words are in {log}" + ("; SIGKILL often means out of memory" if end.exit_code == -9 else ""),
        rank=end.rank,
        exit_code=end.exit_code,
    )


def _interrupted(folder: Path, left: RunRecord, number: int) -> Failure:
    if left.evidence is not None and left.evidence.failure is not None:
        return left.evidence.failure
    record = read_rank_record(folder, 0)
    stage = record.stage if record is not None else "environment_preflight"
    return Failure(
        stage=stage, error_type="Interrupted", message=f"stopped by signal {number} at {stage}", hint="start it again"
    )


def _rewrite(config: RunConfig, folder: Path, left: RunRecord, failure: Failure) -> None:
    """Make evidence.json and report.html say `failure`; what rank 0 had written about itself becomes a note."""
    found = left.evidence or _evidence_from_files(config, folder, left, failure)
    before = found.failure
    notes = found.notes
    if left.evidence is not None and before is not None:
        notes = (*notes, f"rank 0 then ended at {before.stage} with {before.error_type}: {before.message}")
    verdict = decide(
        run_mode="real",
        failure=failure,
        baseline=found.baseline,
        candidate=found.candidate,
        has_evaluation_set=False,
        max_loss_increase=config.evaluation.max_loss_increase,
    )
    said = {name: getattr(verdict, name) for name in Verdict.model_fields}
    with RunRecorder(folder) as recorder:
        recorder.write_evidence(found.model_copy(update={"failure": failure, "notes": notes, **said}))
    write_report(folder)


def _evidence_from_files(config: RunConfig, folder: Path, left: RunRecord, failure: Failure) -> Evidence:
    """Return evidence of a run whose rank 0 could write none: what the files of the run know."""
    num_ranks = len(list((folder / "logs").glob("rank*.log")))
    records = [read_rank_record(folder, rank) for rank in range(num_ranks)]
    kind = "cuda" if any(record is not None and record.device == "cuda" for record in records) else "cpu"
    evidence = Attempt(config, folder, "real", torch.device(kind)).evidence(failure)
    update: dict[str, object] = {}
    manifest: Mapping[str, object] = left.manifest or {}
    model = manifest.get("model")
    if isinstance(model, dict):
        update["model"] = evidence.model.model_copy(update=model)
    lines = left.applied_updates
    last = lines[-1].update if lines else 0
    losses = {(line.update, line.set): line.loss for line in left.evaluations}
    update["baseline"] = Losses(
        name=evidence.baseline.name,
        train_loss=losses.get((0, "train")),
        evaluation_loss=losses.get((0, "evaluation")),
    )
    update["candidate"] = Candidate(
        name=f"after update {last}" if lines else "not trained",
        train_loss=losses.get((last, "train")) if lines else None,
        evaluation_loss=losses.get((last, "evaluation")) if lines else None,
        update_losses=tuple(line.loss for line in lines),
    )
    update["hardware"] = evidence.hardware.model_copy(update={"world": max(1, num_ranks)})
    update["notes"] = (*evidence.notes, "rank 0 could write no evidence; this was made from the files of the run")
    return evidence.model_copy(update=update)
