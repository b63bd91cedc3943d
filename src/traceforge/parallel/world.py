"""The ranks of a run, seen from one of them.

`World` is one process: every exchange returns what went in, so loop, update and evaluation are written once.
`ConnectedWorld` is one of several ranks. It is made in two parts:

    meeting.meet()   A key-value store. Ranks tell each other their devices here, so that two on one card are refused
                     before a library hangs on it, and rank 0 names the run folder.
    start()          The process group with its mesh, after the model is loaded: loading takes ranks minutes, and not
                     the same minutes, which would count against the group's time limit, and a rank that cannot load
                     fails by its own error with nothing to tear down.

Gradients are *summed*: the caller has divided by the denominator of the whole update. Whoever calls an exchange on one
rank calls it on all, also with nothing to give. Before each exchange the ranks tell each other which one they are at
(16 bytes): a rank that left one out would else end all of them inside the library, or be summed with something else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from traceforge.errors import DisagreementError, RankError, RankLostError
from traceforge.parallel import collectives

EXCHANGE_TIMEOUT_S = 1800.0
_EXCHANGES = ("the sum of the gradients", "the weights of rank 0", "the scores", "the sums of numbers", "the checksums")


@dataclass(frozen=True)
class Device:
    """What a rank runs on. `identity` tells cards apart; it is empty on the CPU, which all ranks of a host share."""

    kind: str
    identity: str = ""
    name: str = ""
    memory_bytes: int = 0
    capability: str = ""


def describe_device(device: torch.device) -> Device:
    """Return what tells this device from others, and what the evidence says of it."""
    if device.type != "cuda":
        return Device("cpu")
    properties: Any = torch.cuda.get_device_properties(device)
    return Device(
        "cuda",
        identity=str(properties.uuid),
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=f"{properties.major}.{properties.minor}",
    )


class World:
    """One process. Also the interface of a rank among several.

    Args:
        device: what this rank runs on.
    """

    rank = 0
    size = 1
    data_rank = 0
    data_size = 1
    branch_rank = 0
    branch_size = 1
    backend = "none"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.devices: tuple[Device, ...] = (describe_device(device),)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and speaks to the terminal."""
        return self.rank == 0

    def start(self) -> None:
        """Form the process group; exchanges of tensors and numbers are possible from here on."""

    def close(self) -> None:
        """Leave the group, when every rank has come to its end."""

    def share(self, name: str, make: Callable[[], str]) -> str:
        """Return the text that rank 0 makes; the others wait for it. Possible before `start`, once for each name."""
        return make()

    @contextmanager
    def first_goes_first(self, name: str) -> Iterator[None]:
        """Let rank 0 do the work inside before the others do it, so that they find its caches. Once for each name."""
        yield

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every `.grad` by its sum over all ranks; none counts as zeros, none anywhere stays none."""

    def broadcast(self, parameters: Sequence[Tensor]) -> None:
        """Give every rank the values of rank 0."""

    def gather_scores(self, scores_P: Tensor) -> Tensor:
        """Return the scores of all ranks of this branch group [R, P] by branch rank, without gradient."""
        return scores_P.detach()[None]

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each number over all ranks, in float64."""
        return [float(number) for number in numbers]

    def agree(self, parameters: Sequence[Tensor]) -> None:
        """Check that all ranks hold the same values.

        Raises:
            DisagreementError: they do not; the message names the ranks.
        """

    def barrier(self) -> None:
        """Wait until every rank is here."""


ONE_PROCESS = World(torch.device("cpu"))
"""What exchanges go through where nobody else is; it says nothing of where the model lies."""


class ConnectedWorld(World):
    """One rank of several; see `meet`."""

    def __init__(
        self,
        device: torch.device,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        branch_size: int = 1,
        timeout_s: float = EXCHANGE_TIMEOUT_S,
    ) -> None:
        super().__init__(device)
        self.rank, self.size, self.branch_size = rank, size, branch_size
        self.data_size = size // branch_size
        self.data_rank, self.branch_rank = divmod(rank, branch_size)
        self._store = store
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self._branch_group: dist.ProcessGroup | None = None
        self._wire = torch.device("cpu")
        self._num_exchanges = {False: 0, True: 0}

    def start(self) -> None:
        """Form the process group, and within it one group for each pair of branches.

        Raises:
            RankLostError: a rank did not come within the time limit.
        """
        if self.backend == "nccl":
            self._wire = self.device
        limit = timedelta(seconds=self._timeout_s)
        options = {"device_id": self.device} if self.backend == "nccl" else {}
        store = dist.PrefixStore("group", self._store)
        with self._noticing_lost_ranks("the start of the process group"):
            dist.init_process_group(
                self.backend, store=store, rank=self.rank, world_size=self.size, timeout=limit, **options
            )
            self._group = dist.group.WORLD
            if self.branch_size > 1:  # not torch's DeviceMesh: its groups do not take over the time limit
                grid = torch.arange(self.size).reshape(self.data_size, self.branch_size).tolist()
                groups = [dist.new_group(ranks, timeout=limit) for ranks in grid]
                self._branch_group = groups[self.data_rank]

    def close(self) -> None:
        """Leave the group, when every rank has come to its end."""
        if self._group is not None:
            self.barrier()
            self._group = None
            dist.destroy_process_group()

    def share(self, name: str, make: Callable[[], str]) -> str:
        """Return the text that rank 0 makes; the others wait for it. Possible before `start`, once for each name.

        Raises:
            RankLostError: rank 0 did not give it in time.
        """
        if self.is_first:
            text = make()
            self._store.set(f"share/{name}", text)
            return text
        return self._wait_for(f"share/{name}", f"for rank 0 to give the {name}", self._timeout_s)

    @contextmanager
    def first_goes_first(self, name: str) -> Iterator[None]:
        """Let rank 0 do the work inside before the others do it, so that they find its caches. Once for each name."""
        if not self.is_first:
            self._wait_for(f"first/{name}", f"for rank 0 to be done with {name}", self._timeout_s)
        try:
            yield
        finally:  # also after an error, so that the others meet it too instead of waiting
            if self.is_first:
                self._store.set(f"first/{name}", "done")

    def tell_all(self, name: str, text: str, timeout_s: float) -> list[str]:
        """Return what every rank has to say under `name`, by rank. Possible before `start`, once for each name.

        Raises:
            RankLostError: a rank said nothing in time; the message names it.
        """
        self._store.set(f"{name}/{self.rank}", text)
        return [self._wait_for(f"{name}/{rank}", f"for rank {rank}", timeout_s) for rank in range(self.size)]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every `.grad` by its sum over all ranks; none counts as zeros, none anywhere stays none."""
        with self._exchange("the sum of the gradients") as group:
            collectives.sum_gradients(parameters, group, self._wire)

    def broadcast(self, parameters: Sequence[Tensor]) -> None:
        """Give every rank the values of rank 0."""
        with self._exchange("the weights of rank 0") as group:
            collectives.broadcast(parameters, group, self._wire)

    def gather_scores(self, scores_P: Tensor) -> Tensor:
        """Return the scores of all ranks of this branch group [R, P] by branch rank, without gradient."""
        if self.branch_size == 1:
            return super().gather_scores(scores_P)
        with self._exchange("the scores", within_branches=True) as group:
            return collectives.gather(scores_P, group, self._wire)

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each number over all ranks, in float64."""
        with self._exchange("the sums of numbers") as group:
            return collectives.sum_numbers(numbers, group, self._wire)

    def agree(self, parameters: Sequence[Tensor]) -> None:
        """Check that all ranks hold the same values; cost: one pass over them and eight bytes from each rank.

        Raises:
            DisagreementError: they do not; the message names the ranks.
        """
        own = torch.tensor(collectives.checksum(parameters), dtype=torch.int64)
        with self._exchange("the checksums") as group:
            found = collectives.gather(own, group, self._wire).tolist()
        (usual, _), *others = Counter(found).most_common()
        if others:
            differing = [rank for rank, each in enumerate(found) if each != usual]
            raise DisagreementError(
                f"the trained weights of {name_ranks(differing)} differ from those of the other ranks",
                hint="start again from the last checkpoint; if it happens again, suspect the hardware of these ranks",
            )

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.sum_numbers([0.0])

    @contextmanager
    def _exchange(self, what: str, *, within_branches: bool = False) -> Iterator[dist.ProcessGroup]:
        """Give the group for one exchange, all of whose ranks are at it.

        Raises:
            RankLostError: another rank ended or did not come in time.
            RankError: another rank is at another exchange.
        """
        group = self._branch_group if within_branches else self._group
        assert group is not None, "start() comes before any exchange"
        with self._noticing_lost_ranks(what):
            number = self._num_exchanges[within_branches] = self._num_exchanges[within_branches] + 1
            here = torch.tensor([number, _EXCHANGES.index(what)])
            places = [tuple(each) for each in collectives.gather(here, group, self._wire).tolist()]
            first = self.rank - self.branch_rank if within_branches else 0
            if len(set(places)) > 1:
                told = [f"rank {first + n} at {_EXCHANGES[kind]} ({count})" for n, (count, kind) in enumerate(places)]
                raise RankError(f"the ranks are at different exchanges: {', '.join(told)}", hint="report this fault")
            yield group

    @contextmanager
    def _noticing_lost_ranks(self, what: str) -> Iterator[None]:
        try:
            yield
        except (torch.OutOfMemoryError, RankError):
            raise
        except (RuntimeError, ValueError) as error:
            raise RankLostError(
                f"rank {self.rank} lost the others during {what}: {first_line(error)}",
                hint="another rank ended or did not come within "
                f"{self._timeout_s:.0f} s; logs/ in the run folder has the log of each",
            ) from error

    def _wait_for(self, key: str, what: str, timeout_s: float) -> str:
        # Asked again and again, not waited for inside the store: a signal is answered in between.
        deadline = time.monotonic() + timeout_s
        try:
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    raise RankLostError(
                        f"rank {self.rank} waited {timeout_s:.0f} s {what}",
                        hint="see the log of that rank; start all ranks with the same command",
                    )
                time.sleep(0.05)
            return bytes(self._store.get(key)).decode()
        except (dist.DistError, OSError) as error:
            raise RankLostError(
                f"rank {self.rank} lost the meeting point while waiting {what}: {first_line(error)}",
                hint="the process that started the ranks has ended",
            ) from error


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 1` or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def first_line(error: BaseException) -> str:
    """Return what an error says, without the trace that libraries put behind it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
