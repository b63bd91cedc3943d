"""How ranks find each other: a store at MASTER_ADDR and MASTER_PORT as torchrun sets them, and who has which card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from traceforge.errors import ConfigError, RankError
from traceforge.parallel.devices import is_rank
from traceforge.parallel.world import (
    EXCHANGE_TIMEOUT_S,
    ConnectedWorld,
    Device,
    World,
    describe_device,
    first_line,
    name_ranks,
)

Backend = Literal["auto", "nccl", "gloo"]
MEETING_TIMEOUT_S = 300.0


def meet(
    environment: Mapping[str, str],
    *,
    backend: Backend = "auto",
    branch_parallel: bool = False,
    shared_device: bool = False,
    meeting_timeout_s: float = MEETING_TIMEOUT_S,
    exchange_timeout_s: float = EXCHANGE_TIMEOUT_S,
) -> World:
    """Return this process's place among the ranks that the environment names; without any, one process.

    The visible devices are final by now: see `devices.claim_device`.

    Args:
        environment: variables as torchrun sets them.
        backend: `auto` is NCCL where each rank has a card of its own, else gloo.
        branch_parallel: the two branches of a pair live on two ranks.
        shared_device: allow several ranks on one card.

    Raises:
        ConfigError: a number of ranks that cannot be split into branches, ranks on one card, or a backend that the
            devices cannot have.
        RankError: the meeting point cannot be reached or its port is taken.
        RankLostError: a rank did not come.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before a library chooses one by LOCAL_RANK
    size = int(environment["WORLD_SIZE"]) if is_rank(environment) else 1
    if branch_parallel and size % 2:
        raise ConfigError(
            f"parallel.pairs = 'branch_parallel' puts each pair on two ranks; {size} cannot be split so",
            hint="start an even number: --ranks 2",
        )
    if size == 1:
        return World(device)
    store = _reach(environment, meeting_timeout_s)
    world = ConnectedWorld(
        device,
        store,
        rank=int(environment["RANK"]),
        size=size,
        branch_size=2 if branch_parallel else 1,
        timeout_s=exchange_timeout_s,
    )
    told = world.tell_all("device", json.dumps(asdict(describe_device(device))), meeting_timeout_s)
    world.devices = tuple(Device(**json.loads(each)) for each in told)
    world.backend = choose_backend(backend, world.devices, shared_device=shared_device)
    return world


def choose_backend(asked: Backend, devices: Sequence[Device], *, shared_device: bool) -> str:
    """Return `nccl` or `gloo` for ranks on these devices.

    Raises:
        ConfigError: two ranks on one card that are not allowed to share it, some ranks with a card and some without,
            or `nccl` where it cannot be.
    """
    without = [rank for rank, device in enumerate(devices) if device.kind == "cpu"]
    if 0 < len(without) < len(devices):
        raise ConfigError(
            f"no GPU can be seen by {name_ranks(without)}, the others have one",
            hint="start one rank for each GPU, or hide all with CUDA_VISIBLE_DEVICES=''",
        )
    owners: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        if device.kind != "cpu":
            owners.setdefault(device.identity, []).append(rank)
    crowded = [ranks for ranks in owners.values() if len(ranks) > 1]
    if crowded and not shared_device:
        raise ConfigError(
            f"{name_ranks(crowded[0])} are on one card ({devices[crowded[0][0]].identity})",
            hint="start one rank for each GPU; for a trial on one card allow it by name: "
            "--set parallel.shared_device=true",
        )
    if asked == "nccl" and (without or crowded):
        what = "ranks share a card (parallel.shared_device)" if crowded else "the ranks run on the CPU"
        raise ConfigError(f"parallel.backend = 'nccl' cannot be honoured: {what}", hint="set parallel.backend = 'gloo'")
    if asked == "auto":
        return "gloo" if without or crowded or not dist.is_nccl_available() else "nccl"
    return asked


def _reach(environment: Mapping[str, str], timeout_s: float) -> dist.Store:
    host = environment["MASTER_ADDR"]
    place = f"{f'[{host}]' if ':' in host else host}:{environment['MASTER_PORT']}"
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    try:
        store, _, _ = next(iter(dist.rendezvous(f"tcp://{place}", rank, size, timeout=timedelta(seconds=timeout_s))))
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        taken = "address already in use" in str(error).lower()
        raise RankError(
            f"rank {rank} cannot {'open' if taken else 'reach'} the meeting point {place}: {first_line(error)}",
            hint="another program has this port: choose a free one, or use --ranks, which always does"
            if taken
            else "MASTER_ADDR and MASTER_PORT name rank 0's host and a port that every host can reach",
        ) from error
    return store
