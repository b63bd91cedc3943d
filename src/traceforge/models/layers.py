"""The lean layer path: a decoder layer's forward and backward by hand, keeping nothing on the device in between.

For dense layers of the Llama kind (RMSNorm, RoPE, grouped softmax attention, SwiGLU; Llama, Qwen2, Qwen3, Mistral):

    a = x + O(attention(q, k, v))      q, k, v = RoPE(norm(QKV(norm1(x))))
    y = a + D(silu(G(norm2(a))) * U(norm2(a)))

Forward  The input x, the attention output o and its log-sum-exp leave for the host. Everything but attention runs in
         tiles of tokens, so no [tokens x MLP size] buffer exists.
Backward x, o and the log-sum-exp come back. A: per tile, a and the MLP are computed again (never D), the gradient goes
         through the MLP and O. B: q, k, v are computed again, attention's backward runs over a few heads at a time, and
         the gradients replace q, k, v in place. C: per tile, through QKV and norm1.
Frozen   Weights have no gradient; adapters are folded into the matmuls (`memory/folded_linear.py`).

Cost     Device memory of a row of T tokens in units of one [T x D] buffer: 4.8 in backward (grouped heads 4:1). Adds
         the matmuls of Q, K, V, O, G and U once more; with `recompute_attention` attention's forward too, and half
         the bytes on the host.
Identity The generic path up to the order of summation (float32: loss 1e-6, gradients 1e-6 relative).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from traceforge.errors import TrainingError
from traceforge.memory.folded_linear import AdapterGradients, FoldedLinear
from traceforge.memory.layer_maths import (
    rms_norm,
    rms_norm_backward_,
    rotary,
    rotary_backward_,
    swiglu,
    swiglu_backward_,
)
from traceforge.memory.offload import ActivationStore, Arrival, Saved
from traceforge.memory.weights import LayerWeights
from traceforge.models.layer_parts import LayerParts, LayerShape, Norm, RowPass
from traceforge.models.rectangles import attend, attend_backward


class LeanLayers:
    """All layers of a model, run over one row at a time.

    Args:
        layers: linears and norms of each.
        weights: where the frozen weights are.
        store: where activations wait.
        dtype: dtype of hidden states and of the arithmetic.
    """

    def __init__(
        self,
        shape: LayerShape,
        layers: list[LayerParts],
        weights: LayerWeights,
        store: ActivationStore,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.layers, self.weights, self.store, self.dtype = shape, layers, weights, store, dtype
        self.device = store.lanes.device

    def run(self, hidden_TD: Tensor, row: RowPass) -> Tensor:
        """Return the hidden states [T, D] after the last layer, before the final norm."""
        if torch.is_grad_enabled():
            row.generation = self.store.begin(len(self.layers), self._saved(row), row.tiles)
        for number, layer in enumerate(self.layers):
            hidden_TD = _Layer.apply(hidden_TD, self, number, row, *layer.parameters())
        return hidden_TD

    def _saved(self, row: RowPass) -> dict[str, Saved]:
        tokens, shape = row.num_tokens, self.shape
        plan = {"input": Saved((tokens, shape.hidden), self.dtype, by_tile=True)}
        if not row.recomputes_attention:
            width = shape.queries // len(row.passes)
            plan |= {name: Saved((tokens, width), self.dtype, by_tile=True) for name in row.names}
            wide = torch.promote_types(self.dtype, torch.float32)
            plan["logsumexp"] = Saved((shape.heads, tokens), wide, by_tile=False)
        return plan

    def _room(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _matrices(self, number: int, wanted: Sequence[FoldedLinear]) -> list[Tensor]:
        """Write out the folded matrices of some of a layer's linears."""
        parts = iter(self.weights.use(number))
        found: dict[int, list[tuple[Tensor, ...]]] = {}
        for group in self.layers[number].groups():
            found[id(group)] = [next(parts) for _ in group.linears]
        return [group.matrix(found[id(group)], self.device) for group in wanted]

    # ----------------------------------------------------------------------------------------------------- forward

    def forward(self, x_TD: Tensor, number: int, row: RowPass) -> Tensor:
        """Return a layer's output [T, D]; saves what its backward needs if the row is kept."""
        layer, shape = self.layers[number], self.shape
        keeps = row.generation is not None
        if keeps:
            self.store.save(number, "input", x_TD)
        self.weights.prefetch(number)
        self.weights.prefetch(number + 1)
        (matrix,) = self._matrices(number, [layer.qkv])
        projected = self._projected(layer, x_TD, matrix, row)
        del matrix
        parts, logsumexp_HT = self._attention(layer, projected, row)
        del projected
        if keeps and not row.recomputes_attention:
            for name, part_TW in zip(row.names, parts, strict=True):
                self.store.save(number, name, part_TW)
            self.store.save(number, "logsumexp", logsumexp_HT)
        w_out, w_gate_up, w_down = self._matrices(number, [layer.out, layer.gate_up, layer.down])
        y_TD = self._room(*x_TD.shape)
        for tile in row.tiles:
            heads = self._heads_of_tile(layer, [part_TW[tile] for part_TW in parts])
            y = layer.out.add_forward(x_TD[tile], heads, w_out, y_TD[tile])
            del heads
            normed = self._normed(layer.gate_up, y, layer.mlp_norm)
            gate_up = layer.gate_up.forward(normed, w_gate_up, self._room(y.shape[0], 2 * shape.mlp))
            del normed
            hidden = layer.down.input_buffer(y.shape[0], self.device)
            swiglu(gate_up, hidden[:, : shape.mlp])
            del gate_up
            layer.down.add_forward(y, hidden, w_down, y)
            del hidden
        self.store.settle()
        if not (keeps and number == len(self.layers) - 1):  # the last layer's backward comes next
            self.weights.release(number)
        return y_TD

    def _normed(self, linear: FoldedLinear, x_TD: Tensor, norm: Norm) -> Tensor:
        """Return the input buffer of a linear with the normalised x in it."""
        buffer = linear.input_buffer(x_TD.shape[0], self.device)
        rms_norm(x_TD, *norm, buffer[:, : linear.in_features])
        return buffer

    def _heads_of_tile(self, layer: LayerParts, parts: list[Tensor]) -> Tensor:
        """Return the input buffer of O for a tile, the heads of all passes side by side."""
        buffer = layer.out.input_buffer(parts[0].shape[0], self.device)
        width = parts[0].shape[1]
        for number, part in enumerate(parts):
            buffer[:, number * width : (number + 1) * width] = part
        return buffer

    def _projected(self, layer: LayerParts, x_TD: Tensor, matrix: Tensor, row: RowPass) -> Tensor:
        """Return q, k and v before norm and RoPE, side by side [T, O + R]: room for their folded gradient."""
        projected = layer.qkv.gradient_buffer(row.num_tokens, self.device)
        for tile in row.tiles:
            normed = self._normed(layer.qkv, x_TD[tile], layer.input_norm)
            layer.qkv.forward(normed, matrix, projected[tile, : layer.qkv.out_features])
        return projected

    def _parts_of_pass(self, projected: Tensor, heads: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, H', K], k and v [T, G', K] of a range of key heads, as views."""
        shape = self.shape
        size, group = shape.head_size, shape.heads // shape.key_heads

        def view(first: int, count: int) -> Tensor:
            return projected[:, first : first + count * size].unflatten(1, (count, size))

        count = heads.stop - heads.start
        return (
            view(heads.start * group * size, count * group),
            view(shape.queries + heads.start * size, count),
            view(shape.queries + shape.keys + heads.start * size, count),
        )

    def _turned(self, layer: LayerParts, q_THK: Tensor, k_TGK: Tensor, row: RowPass) -> tuple[Tensor, Tensor]:
        found = []
        for part, norm in ((q_THK, layer.query_norm), (k_TGK, layer.key_norm)):
            weight, eps = (None, 0.0) if norm is None else norm
            found.append(rotary(part, row.cos_TK, row.sin_TK, weight, eps, self._room(*part.shape)))
        return found[0], found[1]

    def _attention(self, layer: LayerParts, projected: Tensor, row: RowPass) -> tuple[list[Tensor], Tensor]:
        """Return attention's output of each pass [T, W] and its log-sum-exp [H, T]."""
        shape = self.shape
        tokens, group = row.num_tokens, shape.heads // shape.key_heads
        parts = [self._room(tokens, shape.queries // len(row.passes)) for _ in row.passes]
        wide = torch.promote_types(self.dtype, torch.float32)
        logsumexp_HT = torch.empty(shape.heads, tokens, dtype=wide, device=self.device)
        # Without a fork nothing is merged, and all heads together fill the card best.
        at_once = [slice(0, shape.key_heads)] if len(row.tasks) == 1 else row.passes
        per_pass = shape.key_heads // len(row.passes)
        for heads in at_once:
            q, k, v = self._parts_of_pass(projected, heads)
            q, k = self._turned(layer, q, k, row)
            output, logsumexp = attend(_as_heads(q), _as_heads(k), _as_heads(v), row.tasks, shape.scale)
            del q, k, v
            found = parts[heads.start // per_pass : heads.stop // per_pass]
            for part_TW, heads_HTK in zip(found, output[0].chunk(len(found)), strict=True):
                part_TW.unflatten(1, (-1, shape.head_size)).copy_(heads_HTK.transpose(0, 1))
            logsumexp_HT[heads.start * group : heads.stop * group] = logsumexp[0]
        return parts, logsumexp_HT

    # ---------------------------------------------------------------------------------------------------- backward

    def backward(
        self, grad_TD: Tensor, number: int, row: RowPass, *, needs_input: bool
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradient of a layer's input (written over that of its output) and of its adapters.

        Raises:
            TrainingError: another row has been kept since this one's forward pass.
        """
        if row.generation != self.store.generation:
            raise TrainingError(
                "the lean path keeps one row at a time: another forward pass with gradients came before this backward",
                hint="run backward after each forward pass, or set memory.path = 'generic'",
            )
        layer = self.layers[number]
        saved = self.store.take(number)
        sums = {id(group): AdapterGradients(group, self.device) for group in layer.groups()}
        grad_TD = grad_TD.contiguous()
        projected: Tensor | None = None
        if row.recomputes_attention:
            x_TD = saved["input"].wait()
            (matrix,) = self._matrices(number, [layer.qkv])
            projected = self._projected(layer, x_TD, matrix, row)
            del matrix
            parts, logsumexp_HT = self._attention(layer, projected, row)
            made = {**dict(zip(row.names, parts, strict=True)), "logsumexp": logsumexp_HT}
            saved |= {name: Arrival(self.store.lanes, tensor, []) for name, tensor in made.items()}
            del x_TD, parts, logsumexp_HT, made
        d_parts = self._through_mlp(layer, number, grad_TD, saved, row, sums)
        (matrix,) = self._matrices(number, [layer.qkv])
        if projected is None:
            projected = self._projected(layer, saved["input"].tensor, matrix, row)
        self.weights.release(number)
        self.weights.prefetch(number - 1)
        self._through_attention(layer, number, projected, saved, d_parts, row)
        self.store.prefetch(number - 1)
        self._through_projection(
            layer, grad_TD, saved["input"], projected, matrix, row, sums[id(layer.qkv)], needs_input
        )
        found = [each for group in layer.groups() for each in sums[id(group)].by_parameter()]
        return (grad_TD if needs_input else None), found

    def _through_mlp(
        self,
        layer: LayerParts,
        number: int,
        grad_TD: Tensor,
        saved: dict[str, Arrival],
        row: RowPass,
        sums: dict[int, AdapterGradients],
    ) -> list[Tensor]:
        """Phase A: turn the gradient of y into that of a, and return that of attention's output of each pass [T, W]."""
        shape = self.shape
        w_out, w_gate_up, w_down = self._matrices(number, [layer.out, layer.gate_up, layer.down])
        width = shape.queries // len(row.passes)
        d_parts = [self._room(row.num_tokens, width) for _ in row.passes]
        for j, tile in enumerate(row.tiles):
            tokens = tile.stop - tile.start
            heads = self._heads_of_tile(layer, [saved[name].wait(j)[tile] for name in row.names])
            after = layer.out.add_forward(saved["input"].wait(j)[tile], heads, w_out, self._room(tokens, shape.hidden))
            normed = self._normed(layer.gate_up, after, layer.mlp_norm)
            gate_up = layer.gate_up.gradient_buffer(tokens, self.device)
            layer.gate_up.forward(normed, w_gate_up, gate_up[:, : 2 * shape.mlp])
            d_y = self._folded(layer.down, grad_TD[tile], w_down)
            hidden = layer.down.input_buffer(tokens, self.device)
            layer.down.input_gradient(d_y, w_down, hidden[:, : shape.mlp])
            swiglu_backward_(gate_up[:, : 2 * shape.mlp], hidden[:, : shape.mlp])
            layer.down.fold_input(hidden, w_down)
            sums[id(layer.down)].add(d_y, hidden)
            del d_y, hidden
            layer.gate_up.fold_gradient(gate_up, w_gate_up)
            d_normed = layer.gate_up.input_gradient(gate_up, w_gate_up, self._room(tokens, shape.hidden))
            sums[id(layer.gate_up)].add(gate_up, normed)
            del gate_up, normed
            rms_norm_backward_(d_normed, after, *layer.mlp_norm, grad_TD[tile], adds=True)
            del d_normed, after
            d_after = self._folded(layer.out, grad_TD[tile], w_out)
            d_tile = layer.out.input_gradient(d_after, w_out, self._room(tokens, shape.queries))
            sums[id(layer.out)].add(d_after, heads)
            for part_TW, found in zip(d_parts, d_tile.split(width, dim=1), strict=True):
                part_TW[tile] = found
        return d_parts

    def _folded(self, linear: FoldedLinear, grad: Tensor, matrix: Tensor) -> Tensor:
        """Return `[dy | dy sB]` of a tile."""
        buffer = linear.gradient_buffer(grad.shape[0], self.device)
        buffer[:, : linear.out_features] = grad
        linear.fold_gradient(buffer, matrix)
        return buffer

    def _through_attention(
        self,
        layer: LayerParts,
        number: int,
        projected: Tensor,
        saved: dict[str, Arrival],
        d_parts: list[Tensor],
        row: RowPass,
    ) -> None:
        """Phase B: overwrite q, k and v in `projected` with their gradients, a few heads at a time.

        With several passes (a long row) x is let go of first, and comes again into the room that the first give back.
        """
        size, group = self.shape.head_size, self.shape.heads // self.shape.key_heads
        passes = len(row.passes)
        returns_after = passes // 2
        if returns_after:
            del saved["input"]
        logsumexp_HT = saved.pop("logsumexp").wait()
        for done, (heads, name) in enumerate(zip(row.passes, row.names, strict=True), start=1):
            raw_q, raw_k, v = self._parts_of_pass(projected, heads)
            q, k = self._turned(layer, raw_q, raw_k, row)
            d_q, d_k, d_v = attend_backward(
                _as_heads(d_parts.pop(0).unflatten(1, (-1, size))),
                (_as_heads(q), _as_heads(k), _as_heads(v)),
                _as_heads(saved.pop(name).wait().unflatten(1, (-1, size))),
                logsumexp_HT[None, heads.start * group : heads.stop * group],
                row.tasks,
                self.shape.scale,
            )
            del q, k
            for grad, raw, norm in ((d_q, raw_q, layer.query_norm), (d_k, raw_k, layer.key_norm)):
                weight, eps = (None, 0.0) if norm is None else norm
                rotary_backward_(grad[0].transpose(0, 1), raw, row.cos_TK, row.sin_TK, weight, eps)
            v.copy_(d_v[0].transpose(0, 1))
            del d_q, d_k, d_v, grad
            if done == returns_after:
                saved["input"] = self.store.bring_again(number, "input")

    def _through_projection(  # noqa: PLR0913 - all of it is the state of one layer's backward
        self,
        layer: LayerParts,
        grad_TD: Tensor,
        inputs: Arrival,
        projected: Tensor,
        matrix: Tensor,
        row: RowPass,
        sums: AdapterGradients,
        needs_input: bool,
    ) -> None:
        """Phase C: through Q, K, V and the input norm; adds to the gradient of a what reaches x on this way."""
        for j, tile in enumerate(row.tiles):
            x_TD = inputs.wait(j)[tile]
            normed = self._normed(layer.qkv, x_TD, layer.input_norm)
            layer.qkv.fold_input(normed, matrix)
            grad = projected[tile]
            layer.qkv.fold_gradient(grad, matrix)
            sums.add(grad, normed)
            if needs_input:
                d_normed = layer.qkv.input_gradient(grad, matrix, self._room(grad.shape[0], self.shape.hidden))
                rms_norm_backward_(d_normed, x_TD, *layer.input_norm, grad_TD[tile], adds=True)


def _as_heads(part_THK: Tensor) -> Tensor:
    """Return [T, H, K] as [1, H, T, K], a view."""
    return part_THK.transpose(0, 1)[None]


class _Layer(torch.autograd.Function):
    """One layer in autograd's graph. Its backward overwrites the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, layers: LeanLayers, number: int, row: RowPass, *parameters: Tensor) -> Tensor:
        ctx.layers, ctx.number, ctx.row = layers, number, row
        with torch.autocast(x_TD.device.type, enabled=False):
            return layers.forward(x_TD, number, row)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        with torch.autocast(grad_TD.device.type, enabled=False):
            grad, found = ctx.layers.backward(grad_TD, ctx.number, ctx.row, needs_input=ctx.needs_input_grad[0])
        return (grad, None, None, None, *found)
