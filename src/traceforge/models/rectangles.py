"""Attention of a row from its rectangles: outputs merged by log-sum-exp, gradients summed. See `attention.py`.

Most queries of a long row take part in one rectangle only, and most results then need no merging. So wide (float32)
sums exist only for the span of queries, and of keys, that more than one rectangle touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from traceforge.models.kernels import Task
from traceforge.samples.rows import Piece


def attend(query: Tensor, key: Tensor, value: Tensor, tasks: Sequence[Task], scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [1, H, T, K] and the log-sum-exp [1, H, T] of a row whose rectangles are `tasks`.

    Every query has one causal rectangle, which stands before the others in `tasks`.
    """
    if len(tasks) == 1:
        return tasks[0].kernel.forward(query, key, value, causal=True, scale=scale)
    output = _Sum(query, _span(_queries(task.piece) for task in tasks if not task.piece.causal))
    logsumexp = torch.empty(query.shape[:-1], dtype=output.wide.dtype, device=query.device)
    for piece, kernel in tasks:
        queries, keys = _queries(piece), _keys(piece)
        part, part_lse = kernel.forward(
            query[:, :, queries], key[:, :, keys], value[:, :, keys], causal=piece.causal, scale=scale
        )
        if piece.causal:  # the first part of these queries
            output.put(queries, part)
            logsumexp[:, :, queries] = part_lse
        else:
            _merge(output.wide_part(queries), logsumexp[:, :, queries], part, part_lse)
    return output.narrowed(), logsumexp


def attend_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    output: Tensor,
    logsumexp: Tensor,
    tasks: Sequence[Task],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; `output` and `logsumexp` are those of `attend`."""
    query, key, value = inputs
    if len(tasks) == 1:
        return tasks[0].kernel.backward(grad, inputs, output, logsumexp, causal=True, scale=scale)
    others = [task.piece for task in tasks if not task.piece.causal]
    d_query = _Sum(query, _span(map(_queries, others)))
    d_key, d_value = (_Sum(each, _span(map(_keys, others))) for each in (key, value))
    for piece, kernel in tasks:
        queries, keys = _queries(piece), _keys(piece)
        part = kernel.backward(
            grad[:, :, queries],
            (query[:, :, queries], key[:, :, keys], value[:, :, keys]),
            output[:, :, queries],
            logsumexp[:, :, queries],
            causal=piece.causal,
            scale=scale,
        )
        for total, where, found in zip((d_query, d_key, d_value), (queries, keys, keys), part, strict=True):
            if piece.causal:
                total.put(where, found)
            else:
                total.wide_part(where).add_(found)
    return d_query.narrowed(), d_key.narrowed(), d_value.narrowed()


class _Sum:
    """A tensor like `model` [1, H, T, K] whose span `shared` of T is summed in float32 or wider."""

    def __init__(self, model: Tensor, shared: slice) -> None:
        self.total = torch.empty_like(model)
        self.shared = shared
        wide = torch.promote_types(model.dtype, torch.float32)
        size = (*model.shape[:2], shared.stop - shared.start, model.shape[3])
        self.wide = torch.empty(size, dtype=wide, device=model.device)

    def put(self, where: slice, part: Tensor) -> None:
        """Write the first part of a range, each position of T once."""
        for span, into, origin in (
            (slice(0, self.shared.start), self.total, 0),
            (self.shared, self.wide, self.shared.start),
            (slice(self.shared.stop, self.total.shape[2]), self.total, 0),
        ):
            start, stop = max(where.start, span.start), min(where.stop, span.stop)
            if start < stop:
                into[:, :, start - origin : stop - origin] = part[:, :, start - where.start : stop - where.start]

    def wide_part(self, where: slice) -> Tensor:
        """Return the wide sums of a range inside the shared span."""
        return self.wide[:, :, where.start - self.shared.start : where.stop - self.shared.start]

    def narrowed(self) -> Tensor:
        """Return the whole in the dtype of the model."""
        self.total[:, :, self.shared] = self.wide.to(self.total.dtype)
        return self.total


def _queries(piece: Piece) -> slice:
    return slice(piece.query_start, piece.query_stop)


def _keys(piece: Piece) -> slice:
    return slice(piece.key_start, piece.key_stop)


def _span(ranges: Iterable[slice]) -> slice:
    found = list(ranges)
    return slice(min((each.start for each in found), default=0), max((each.stop for each in found), default=0))


def _merge(output: Tensor, logsumexp: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add one more rectangle to the running output and log-sum-exp of its queries, in place."""
    total = torch.logaddexp(logsumexp, part_lse)
    output.mul_(torch.exp(logsumexp - total)[..., None])
    output.addcmul_(part.to(output.dtype), torch.exp(part_lse - total)[..., None])
    logsumexp.copy_(total)
