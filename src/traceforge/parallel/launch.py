"""Starting the ranks of one host: torch's own elastic agent, with the ends of a run made short and certain.

Meeting   The agent opens its store on a free port of 127.0.0.1, so two runs never meet and no host name is looked up.
Devices   Each rank gets CUDA_VISIBLE_DEVICES of its own, and so sees one card, as number 0.
Output    stderr of rank n goes to `logs/rank{n}.log`; that of rank 0 is also shown. stdout of rank 0 is this
          process's own, for one result; the others' joins their log.
Ends      A rank that ends with anything but 0 ends the others: SIGTERM, and SIGKILL after `GRACE_S`, because a rank
          that waits for a dead one inside a library answers no signal. A signal to this process is handed on, and the
          ranks get `SAVING_S` to save. A rank whose starter has vanished stops itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from traceforge.errors import RankError
from traceforge.parallel.child import STARTED_BY

GRACE_S = 12.0
SAVING_S = 900
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    Args:
        exit_code: below 0 = the signal that killed it.
        first: it ended before the others were told to.
    """

    rank: int
    pid: int
    exit_code: int
    first: bool

    @property
    def cause(self) -> str:
        """The end in words."""
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-self.exit_code).name}"
        return f"killed by signal {-self.exit_code}"


@dataclass(frozen=True)
class RanksEnded:
    """How all ranks ended.

    Args:
        failures: the ranks that did not end with exit code 0, by rank; those that ended first are marked.
        signal_number: the signal that this process got and handed on, or None.
    """

    failures: tuple[RankEnd, ...] = ()
    signal_number: int | None = None


def start_ranks(
    command: Sequence[str],
    *,
    devices: Sequence[str],
    logs: Path,
    environment: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
) -> RanksEnded:
    """Run `command` once for each device and return when all have ended. Leaves no process behind.

    Args:
        command: program and arguments, the same for every rank; RANK, WORLD_SIZE and so on tell them apart.
        devices: CUDA_VISIBLE_DEVICES of each rank; empty = the CPU.
        logs: folder of the logs.
        environment: more variables for every rank.
        grace_s: how long the others may take to end after one has.

    Raises:
        RankError: the ranks could not be started.
    """
    logs.mkdir(parents=True, exist_ok=True)
    shared = {"OMP_NUM_THREADS": str(_threads(len(devices))), STARTED_BY: str(os.getpid()), **(environment or {})}
    if loopback := _loopback_interface():
        shared.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", loopback))
    agent: _Agent | None = None
    number: int | None = None
    with _signals_raise(), _quiet_agent():
        try:
            agent = _agent(command, devices, _Logs(logs, devices, shared), grace_s)
            failures = agent.run().failures
        except SignalException as stopped:
            number, failures = int(stopped.sigval), {}
        except (RendezvousError, RuntimeError, ValueError, OSError) as error:
            raise RankError(f"the ranks could not be started: {error}", hint=f"see {logs}") from error
        finally:
            if agent is not None:
                agent.end_all()
    first = agent.first_ended if agent is not None else frozenset()
    ends = [RankEnd(rank, each.pid, each.exitcode, rank in first) for rank, each in sorted(failures.items())]
    return RanksEnded(tuple(ends), number)


class _Agent(LocalElasticAgent):
    """torch's agent, which notices a dead rank itself instead of after 30 s more."""

    def __init__(self, *args: Any, grace_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grace_s = grace_s
        self.first_ended: frozenset[int] = frozenset()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self.first_ended:
            ended = frozenset(each.global_rank for each in worker_group.workers if _has_failed(each.id))
            if ended:
                self.first_ended = ended
                self._end([each.id for each in worker_group.workers], self._grace_s)
        return super()._monitor_workers(worker_group)

    def end_all(self) -> None:
        """Kill whatever still runs, for example after a third Ctrl-C in the middle of the agent's own clean-up."""
        self._end([each.id for each in self.get_worker_group().workers], 0)

    def _end(self, pids: Sequence[int], grace_s: float) -> None:
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + wait_s
            left = [pid for pid in pids if _runs(pid)]
            for pid in left:
                with contextlib.suppress(OSError):
                    os.killpg(pid, number)  # each rank leads a group of its own: its helpers end with it
            while time.monotonic() < deadline and any(map(_runs, left)):
                time.sleep(0.05)


class _Logs(LogsSpecs):
    """Where the ranks' output goes, and the variables that differ from rank to rank."""

    def __init__(self, folder: Path, devices: Sequence[str], shared: Mapping[str, str]) -> None:
        super().__init__(str(folder))
        self._folder, self._devices, self._shared = folder, devices, shared

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        files = {number: str(self._folder / f"rank{number}.log") for number in envs}
        for number, variables in envs.items():
            variables.update(self._shared)
            variables["CUDA_VISIBLE_DEVICES"] = self._devices[number]
            if self._devices[number]:  # libraries choose a card by LOCAL_RANK, and there is only number 0
                variables["LOCAL_RANK"] = "0"
            variables["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(
            stdouts=dict.fromkeys(envs, ""),
            stderrs=files,
            tee_stderrs={0: files[0]},
            error_files=dict.fromkeys(envs, os.devnull),
        )


def _agent(command: Sequence[str], devices: Sequence[str], logs: _Logs, grace_s: float) -> _Agent:
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint=f"{_LOOPBACK}:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr=_LOOPBACK,
        is_host="true",
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=len(devices),
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=get_rendezvous_handler(meeting),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=_LOOPBACK,
    )
    return _Agent(
        spec, logs_specs=logs, log_line_prefix_template="[rank 0] ", shutdown_timeout=SAVING_S, grace_s=grace_s
    )


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into the agent's exception from here on (it does so itself only once ranks run)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"signal {number}", sigval=signal.Signals(number))

    kept = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGQUIT)}
    kept |= {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's own lines off the screen: what happened is said once, by whoever reads the result."""
    logger = logging.getLogger("torch.distributed.elastic")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _runs(pid: int) -> bool:
    """Return whether our child `pid` still runs; a stranger that got the number of an ended one does not count."""
    try:
        process = psutil.Process(pid)
        return bool(process.ppid() == os.getpid() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _has_failed(pid: int) -> bool:
    """Return whether the process has ended with anything but 0; it is left for the agent to collect."""
    if _runs(pid):
        return False
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False  # collected already: it ended well, or the agent knows
    return found is not None and (found.si_code != os.CLD_EXITED or found.si_status != 0)


def _threads(num_ranks: int) -> int:
    given = os.environ.get("OMP_NUM_THREADS")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(given) if given else max(1, usable // num_ranks)


def _loopback_interface() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), None)
