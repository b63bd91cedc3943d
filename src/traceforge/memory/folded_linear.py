"""Linears that share one input, with LoRA folded into the matmul's inner dimension.

With x [T, I], frozen W [O, I], adapters A [R, I] and s B [O, R], forward and input gradient are one matmul each:

    y  = [x | x A'] [W | sB]'            dx = [dy | dy sB] [W ; A]

so the adapter costs R more columns, not three more kernels. Several linears of one input (q, k, v; gate, up) stand
below each other; their ranks stand side by side. R is padded so that the inner dimension stays a multiple of what
tensor cores like; the padding is zero. A linear without an adapter has rank 0.

Cost     The folded matrix is written once per use of a layer: (O + R) x (I + R) values.
Identity The order of summation; in 16 bits s B is rounded once where PEFT rounds B and the product.

Shape legend beside the package's: I input features, O output features of all linears, R padded rank of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from traceforge.memory.weights import FrozenWeight


@dataclass(frozen=True)
class AdaptedLinear:
    """One linear: frozen weight, bias if it has one, and its adapter (A [rank, I], B [O, rank], scaling) or None."""

    weight: FrozenWeight
    bias_O: Tensor | None = None
    adapter: tuple[nn.Parameter, nn.Parameter, float] | None = None

    @property
    def rank(self) -> int:
        """Rank of the adapter, 0 without one."""
        return 0 if self.adapter is None else int(self.adapter[0].shape[0])


class AdapterGradients:
    """Sums of the adapter gradients of a `FoldedLinear` over tiles, in float32 or wider."""

    def __init__(self, linear: FoldedLinear, device: torch.device) -> None:
        self._linear = linear
        self.a_RI = torch.zeros(linear.padded_rank, linear.in_features, dtype=linear.wide, device=device)
        self.b_OR = torch.zeros(linear.out_features, linear.padded_rank, dtype=linear.wide, device=device)

    def add(self, grad: Tensor, inputs: Tensor) -> None:
        """Add one tile: `[dy | dy sB]` and `[x | x A']`, both complete."""
        linear = self._linear
        if linear.padded_rank:
            self.a_RI += _wide_matmul(grad[:, linear.out_features :].T, inputs[:, : linear.in_features])
            self.b_OR += _wide_matmul(grad[:, : linear.out_features].T, inputs[:, linear.in_features :])

    def by_parameter(self) -> list[Tensor | None]:
        """Return the gradient of each of `FoldedLinear.parameters()`, None where it is not trained."""
        found: list[Tensor | None] = []
        for linear, rows, ranks in self._linear.places():
            if linear.adapter is None:
                continue
            a, b, scaling = linear.adapter
            found.append(self.a_RI[ranks].to(a.dtype, copy=True) if a.requires_grad else None)
            found.append((self.b_OR[rows, ranks] * scaling).to(b.dtype) if b.requires_grad else None)
        return found


def _wide_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return a matmul accumulated and kept in float32 or wider."""
    if left.dtype in (torch.float32, torch.float64):
        return torch.mm(left, right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


class FoldedLinear:
    """See the module.

    Args:
        linears: the linears, in the order of their outputs.
        dtype: dtype of the arithmetic.
        rank_multiple: the padded rank is a multiple of this.
    """

    def __init__(self, linears: Sequence[AdaptedLinear], dtype: torch.dtype, *, rank_multiple: int = 1) -> None:
        self.linears, self.dtype = list(linears), dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.in_features = self.linears[0].weight.shape[1]
        self.out_features = sum(linear.weight.shape[0] for linear in self.linears)
        self.padded_rank = -(-sum(linear.rank for linear in self.linears) // rank_multiple) * rank_multiple
        self.bias_O: Tensor | None = None
        if any(linear.bias_O is not None for linear in self.linears):
            self.bias_O = torch.cat([self._bias(linear) for linear in self.linears])

    def _bias(self, linear: AdaptedLinear) -> Tensor:
        if linear.bias_O is not None:
            return linear.bias_O.detach().to(self.dtype)
        return self.linears[0].weight.parts[0].new_zeros(linear.weight.shape[0], dtype=self.dtype)

    def places(self) -> list[tuple[AdaptedLinear, slice, slice]]:
        """Return each linear with its rows of the output and its columns of the rank."""
        found, row, rank = [], 0, 0
        for linear in self.linears:
            rows = slice(row, row + linear.weight.shape[0])
            ranks = slice(rank, rank + linear.rank)
            found.append((linear, rows, ranks))
            row, rank = rows.stop, ranks.stop
        return found

    def parameters(self) -> list[nn.Parameter]:
        """Return the adapters' parameters: A and B of each linear in turn."""
        return [each for linear in self.linears if linear.adapter is not None for each in linear.adapter[:2]]

    def matrix(self, parts: Sequence[tuple[Tensor, ...]], device: torch.device) -> Tensor:
        """Return `[W | sB ; A | .]` [O + R, I + R]; the corner is never read."""
        outputs, inputs, rank = self.out_features, self.in_features, self.padded_rank
        matrix = torch.empty(outputs + rank, inputs + rank, dtype=self.dtype, device=device)
        if rank:
            matrix[:outputs, inputs:] = 0
            matrix[outputs:] = 0
        for (linear, rows, ranks), found in zip(self.places(), parts, strict=True):
            linear.weight.write(found, matrix[rows, :inputs])
            if linear.adapter is not None:
                a, b, scaling = linear.adapter
                columns = slice(inputs + ranks.start, inputs + ranks.stop)
                matrix[rows, columns] = b.detach() * scaling
                matrix[outputs + ranks.start : outputs + ranks.stop, :inputs] = a.detach()
        return matrix

    def input_buffer(self, tokens: int, device: torch.device) -> Tensor:
        """Return room for `[x | x A']`."""
        return torch.empty(tokens, self.in_features + self.padded_rank, dtype=self.dtype, device=device)

    def gradient_buffer(self, tokens: int, device: torch.device) -> Tensor:
        """Return room for `[dy | dy sB]`."""
        return torch.empty(tokens, self.out_features + self.padded_rank, dtype=self.dtype, device=device)

    def fold_input(self, inputs: Tensor, matrix: Tensor) -> None:
        """Write `x A'` beside x."""
        if self.padded_rank:
            low = matrix[self.out_features :, : self.in_features]
            torch.mm(inputs[:, : self.in_features], low.T, out=inputs[:, self.in_features :])

    def fold_gradient(self, grad: Tensor, matrix: Tensor) -> None:
        """Write `dy sB` beside dy."""
        if self.padded_rank:
            high = matrix[: self.out_features, self.in_features :]
            torch.mm(grad[:, : self.out_features], high, out=grad[:, self.out_features :])

    def forward(self, inputs: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
        """Write y to `out` and return it; folds the input first."""
        self.fold_input(inputs, matrix)
        torch.mm(inputs, matrix[: self.out_features].T, out=out)
        if self.bias_O is not None:
            out += self.bias_O
        return out

    def add_forward(self, residual: Tensor, inputs: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
        """Write `residual + y` to `out` and return it; folds the input first. `out` may be `residual`."""
        self.fold_input(inputs, matrix)
        torch.addmm(residual, inputs, matrix[: self.out_features].T, out=out)
        if self.bias_O is not None:
            out += self.bias_O
        return out

    def input_gradient(self, grad: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
        """Write dx to `out` and return it; `grad` is folded already."""
        return torch.mm(grad, matrix[:, : self.in_features], out=out)
