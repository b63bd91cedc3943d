"""Real gloo ranks for tests, at the price of a fork each: a server process has imported torch once for all of them.

    results = in_ranks(2, function, *arguments)      # function(world, *arguments) on every rank, results by rank

The function is one of a module's own, so that it can be pickled. An exception on a rank comes back as `RankFailure`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

_PRELOADED = ["torch", "transformers", "peft", "tests.tiny_models", "traceforge.training.loop", "tests.ranks"]


@dataclass(frozen=True)
class RankFailure:
    """An exception that a rank ended with."""

    error_type: str
    message: str
    trace: str


def in_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    branch_parallel: bool = False,
    exchange_timeout_s: float = 20.0,
    limit_s: float = 60.0,
) -> list[Any]:
    """Return what `function(world, *arguments)` returned on each rank, or the `RankFailure` it ended with."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=limit_s), wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with pytest.MonkeyPatch.context() as patch:  # one thread each, from the server on; this process keeps its own
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    processes, readers = [], []
    for rank in range(num_ranks):
        reader, writer = context.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        options = {"branch_parallel": branch_parallel, "exchange_timeout_s": exchange_timeout_s}
        process = context.Process(target=_rank, args=(writer, environment, options, function, arguments), daemon=True)
        process.start()
        writer.close()
        processes.append(process)
        readers.append(reader)
    try:
        return _results(readers, limit_s)
    finally:
        for process in processes:
            process.join(2)
            process.kill()


def _results(readers: list[Connection], limit_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    while len(found) < len(readers):
        missing = [reader for number, reader in enumerate(readers) if number not in found]
        ready = wait(missing, timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {[n for n in range(len(readers)) if n not in found]} hang"
        for reader in ready:
            try:
                found[readers.index(reader)] = reader.recv()
            except EOFError:
                found[readers.index(reader)] = RankFailure("EOFError", "the process ended without a word", "")
    return [found[rank] for rank in range(len(readers))]


def _rank(
    writer: Connection,
    environment: dict[str, str],
    options: dict[str, Any],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    from traceforge.parallel.meeting import meet

    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        world = meet(environment, meeting_timeout_s=20.0, **options)
        world.start()
        result = function(world, *arguments)
        world.close()
    except BaseException as error:
        result = RankFailure(type(error).__name__, str(error), traceback.format_exc())
    writer.send(result)
