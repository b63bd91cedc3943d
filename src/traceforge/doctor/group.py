"""Whether two ranks of this host could meet: a store and a gloo group on the loopback address, in two threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from traceforge.doctor.findings import Finding

LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(seconds=20)


def look_at_group(address: str = LOOPBACK) -> Finding:
    """Return whether two ranks can exchange a number there."""
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)

    def exchange(rank: int) -> float:
        own = store if rank == 0 else dist.TCPStore(address, store.port, is_master=False, timeout=_TIMEOUT)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = _TIMEOUT
        group = dist.ProcessGroupGloo(dist.PrefixStore("doctor", own), rank, 2, options)
        number = torch.tensor([float(rank + 1)])
        group.allreduce([number]).wait()
        return float(number)

    with ThreadPoolExecutor(2) as pool:
        sums = list(pool.map(exchange, range(2)))
    if sums != [3.0, 3.0]:
        return Finding("ranks", "fail", f"1 + 2 came out as {sums}", "train on one rank: leave out --ranks and --gpus")
    nccl = "NCCL is there" if dist.is_nccl_available() and torch.cuda.is_available() else "no NCCL: ranks use gloo"
    return Finding("ranks", "pass", f"two ranks met on {address} and added a number; {nccl}")
