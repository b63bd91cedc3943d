"""What a run does because it may be one rank of several: it joins the others and makes sure they mean the same run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from traceforge.config import RunConfig
from traceforge.errors import ConfigError, DisagreementError, StorageError, TraceForgeError
from traceforge.evidence.rank_record import RankRecord, write_rank_record
from traceforge.evidence.recorder import create_run_folder
from traceforge.evidence.schema import Failure
from traceforge.parallel.child import RUN_FOLDER, STARTED_BY, settle_in, speak_to
from traceforge.parallel.devices import check_rank_environment, claim_device, is_rank
from traceforge.parallel.meeting import MEETING_TIMEOUT_S, meet
from traceforge.parallel.world import World


def join(config: RunConfig) -> tuple[World, Path]:
    """Return this process's place among the ranks that the environment names, if any, and the run folder.

    The folder is the one that whoever started the ranks has made, or a new one that rank 0 makes. A rank that cannot
    join leaves word in the former.

    Raises:
        ConfigError: the settings cannot be honoured on these ranks.
        RankError: another rank cannot be reached.
        StorageError: the run folder cannot be made.
    """
    settle_in(os.environ)
    given = os.environ.get(RUN_FOLDER)
    try:
        world = _meet(config)
    except TraceForgeError as error:
        if given is not None:
            _leave_word(Path(given), error)
        raise
    if given is not None:
        return world, Path(given)
    folder = Path(world.share("run folder", lambda: str(create_run_folder(config.output_dir, config.run_name))))
    if not world.is_first:
        speak_to(folder / "logs" / f"rank{world.rank}.log")
    return world, folder


def _meet(config: RunConfig) -> World:
    settings = config.parallel
    check_rank_environment(os.environ)
    if is_rank(os.environ) and STARTED_BY not in os.environ:  # torchrun shows every rank all cards
        claim_device(
            os.environ,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            shared=settings.shared_device,
            count_gpus=torch.cuda.device_count,
        )
    world = meet(
        os.environ,
        backend=settings.backend,
        branch_parallel=settings.pairs == "branch_parallel",
        shared_device=settings.shared_device,
        meeting_timeout_s=min(MEETING_TIMEOUT_S, settings.exchange_timeout_s),
        exchange_timeout_s=settings.exchange_timeout_s,
    )
    if world.size > 1 and config.adapter.dropout:
        raise ConfigError(
            f"adapter.dropout = {config.adapter.dropout} cannot be honoured on {world.size} ranks: "
            "they would drop other values than one process",
            hint="set adapter.dropout = 0.0, or train on one rank",
        )
    return world


def check_same(world: World, what: str, own: str) -> None:
    """Make sure that this rank has the same `what` as rank 0, by a hash.

    Raises:
        DisagreementError: it has not.
    """
    if world.share(what, lambda: own) != own:
        raise DisagreementError(
            f"rank {world.rank} has other {what} than rank 0",
            hint="give every host the same files, and start all ranks with the same command",
        )


def _leave_word(folder: Path, error: TraceForgeError) -> None:
    rank = int(os.environ.get("RANK", "0"))
    failure = Failure(
        stage="environment_preflight",
        error_type=type(error).__name__,
        message=error.message,
        hint=error.hint,
        rank=rank,
        exit_code=error.exit_code,
    )
    record = RankRecord(rank=rank, pid=os.getpid(), device="unknown", stage="environment_preflight", failure=failure)
    with contextlib.suppress(StorageError):  # the error itself is what counts
        write_rank_record(folder, record)
