"""Exchanges between the ranks of a group, on plain tensors. Every rank calls the same ones in the same order.

Wire     Tensors travel on `wire`: the rank's card under NCCL, host memory under gloo (which knows few collectives on
         cards). Results come back where they were.
Buckets  Gradients and weights travel in flat buffers of at most `bucket_bytes`, so that a thousand small tensors cost
         a few messages. Gradients travel in float32 (float64 if they are), whatever their own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 1 << 25
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_gradients(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    wire: torch.device,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Replace every `.grad` by its sum over the ranks; a rank without one counts as zeros.

    A parameter that no rank has a gradient for keeps none: the optimizer leaves it alone, as it would in one process.
    """
    ranks_with_it_N = torch.tensor([float(each.grad is not None) for each in parameters], device=wire)
    dist.all_reduce(ranks_with_it_N, group=group)
    some = [each for each, ranks in zip(parameters, ranks_with_it_N.tolist(), strict=True) if ranks]
    for members, dtype in _buckets(some, bucket_bytes, at_least=torch.float32):
        flat = torch.zeros(sum(each.numel() for each in members), dtype=dtype, device=wire)
        for parameter, part in _parts(members, flat):
            if parameter.grad is not None:
                part.copy_(parameter.grad)
        dist.all_reduce(flat, group=group)
        for parameter, part in _parts(members, flat):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part)


def broadcast(
    parameters: Sequence[Tensor],
    group: dist.ProcessGroup,
    wire: torch.device,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Give every rank the values of rank 0, bit for bit."""
    with torch.no_grad():
        for members, dtype in _buckets(parameters, bucket_bytes):
            flat = torch.empty(sum(each.numel() for each in members), dtype=dtype, device=wire)
            for parameter, part in _parts(members, flat):
                part.copy_(parameter)
            dist.broadcast(flat, src=0, group=group)
            for parameter, part in _parts(members, flat):
                parameter.copy_(part)


def gather(tensor: Tensor, group: dist.ProcessGroup, wire: torch.device) -> Tensor:
    """Return the tensors of all ranks of the group [R, ...], in their order, without gradient.

    Every rank gives the same shape and dtype.
    """
    own = tensor.detach().to(wire).contiguous()
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    return torch.stack(found).to(tensor.device)


def sum_numbers(numbers: Sequence[float], group: dist.ProcessGroup, wire: torch.device) -> list[float]:
    """Return the sums of plain numbers over the ranks, in float64."""
    sums_N = torch.tensor(list(numbers), dtype=torch.float64, device=wire)
    dist.all_reduce(sums_N, group=group)
    return [float(each) for each in sums_N.tolist()]


def checksum(parameters: Sequence[Tensor]) -> int:
    """Return one number that a changed bit of any parameter changes.

    It sums the bits of the values as integers, so that the order in which they are added cannot matter. One pass over
    the parameters, no copy of them.
    """
    sums = [_bits(each).sum(dtype=torch.int64) for each in parameters]
    sums_N = torch.stack([each.to(sums[0].device) for each in sums]).cpu()
    return int((sums_N * (2 * torch.arange(len(sums)) + 1)).sum())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])


def _buckets(
    tensors: Sequence[Tensor], bucket_bytes: int, *, at_least: torch.dtype | None = None
) -> list[tuple[list[Tensor], torch.dtype]]:
    """Return runs of tensors that travel together and the dtype they travel in: their own, `at_least` that wide."""
    buckets: list[tuple[list[Tensor], torch.dtype]] = []
    room = 0
    for tensor in tensors:
        dtype = tensor.dtype if at_least is None else torch.promote_types(tensor.dtype, at_least)
        size = tensor.numel() * dtype.itemsize
        if not buckets or buckets[-1][1] != dtype or size > room:
            buckets.append(([], dtype))
            room = bucket_bytes
        buckets[-1][0].append(tensor)
        room -= size
    return buckets


def _parts(members: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    for member in members:
        yield member, flat[start : start + member.numel()].view(member.shape)
        start += member.numel()
