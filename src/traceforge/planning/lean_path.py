"""What the lean path holds (`models/layers.py`), buffer by buffer, at each of its moments.

Shape legend: T tokens of the row, N trained ones, t of a tile, D hidden, F MLP, Q and K width of all query and all key
heads, R padded rank of a folded linear, V vocabulary, b bytes of a value. All sizes in bytes.

Forward  x, [q|k|v] before RoPE, and after it, attention's output twice (as the kernel gives it, and by heads).
Head     hidden states, the output layer, logits of one chunk, d(logp)/d(hidden) of every trained token.
MLP      x, attention's output and its gradient, the layer's gradient; a tile's intermediates; three folded matrices.
Attention the same with [q|k|v] and its folded gradient, and what the kernel's backward takes for a few heads; x only
         in a short row (one pass over the heads), a long one lets go of it meanwhile.
Projection x, [q|k|v] with its folded gradient, the layer's gradient, and already what the layer before it has saved.
"""

from __future__ import annotations

from dataclasses import dataclass

from traceforge.lean_sizes import RANK_MULTIPLE, SHORT_ROW_TOKENS, key_heads_per_pass
from traceforge.planning.budget import CPU_PROCESS, CUDA_PROCESS
from traceforge.planning.ledger import LOADING, Ledger, Moment, Part, moment
from traceforge.planning.setup import Setup
from traceforge.samples.model_shape import ModelShape

_PAGE = 4096


@dataclass(frozen=True)
class _Ranks:
    """Padded ranks of the four folded linears of a layer."""

    qkv: int
    out: int
    gate_up: int
    down: int


def lean_ledger(shape: ModelShape, setup: Setup, *, rectangles: bool = True) -> Ledger:
    """Return what a run on the lean path holds.

    Args:
        rectangles: attention of a row is more than one rectangle (a fork, or a length that cuDNN takes in parts).
    """
    ranks = _ranks(setup)
    fixed = _fixed(shape, setup)
    gradients: dict[Part, int] = {"gradients": 4 * setup.trained_parameters(shape)}
    at_forward: dict[Part, int] = {} if setup.single_row else gradients
    moments = [
        moment(LOADING, fixed, _loading(shape, setup)),
        moment("forward, attention", fixed, at_forward, _forward(shape, setup, ranks, rectangles)),
        moment("log-probabilities", fixed, at_forward, _head(shape, setup)),
        moment("backward, MLP", fixed, gradients, _mlp(shape, setup, ranks)),
        moment("backward, attention", fixed, gradients, _attention(shape, setup, ranks, rectangles)),
        moment("backward, projection", fixed, gradients, _projection(shape, setup, ranks)),
        moment("optimizer", fixed, gradients, {"workspace": setup.optimizer_workspace(shape)}),
    ]
    on_card = setup.device == "cuda"
    pinned = _pinned(shape, setup)
    if on_card:
        return Ledger(tuple(moments), pinned, {"process": CUDA_PROCESS})
    return Ledger(tuple(_on_the_host(each, pinned) for each in moments))


def _on_the_host(each: Moment, pinned: dict[Part, int]) -> Moment:
    """Return a moment of a run on the CPU: what would wait on the host lies in the same memory."""
    return moment(each.name, each.parts, {part: size for part, size in pinned.items() if part != "weights"})


def _ranks(setup: Setup) -> _Ranks:
    rank = setup.rank or 0
    multiple = RANK_MULTIPLE if setup.device == "cuda" and setup.value_bytes == 2 else 1

    def padded(*names: str) -> int:
        return -(-sum(rank for name in names if name in setup.targets) // multiple) * multiple

    return _Ranks(
        padded("q_proj", "k_proj", "v_proj"), padded("o_proj"), padded("gate_proj", "up_proj"), padded("down_proj")
    )


def _fixed(shape: ModelShape, setup: Setup) -> dict[Part, int]:
    """Return what lies on the device all the time."""
    trained = setup.trained_parameters(shape)
    on_device = 0 if setup.streamed else setup.frozen_layer_bytes(shape)
    if setup.device == "cpu":
        on_device = setup.frozen_layer_bytes(shape) + setup.vocabulary_bytes(shape)
    return {
        "weights": on_device + setup.small_bytes(shape),
        "adapter": 4 * trained,
        "optimizer": setup.moments_on_device(shape),
        "process": CPU_PROCESS if setup.device == "cpu" else 0,
    }


def _loading(shape: ModelShape, setup: Setup) -> dict[Part, int]:
    """Return what loading adds: everything comes to the device first, tables and streamed layers move on from there."""
    if setup.device == "cpu":
        return {}
    moved = setup.vocabulary_bytes(shape) + (setup.frozen_layer_bytes(shape) if setup.streamed else 0)
    # Moments of Adam do not exist yet, so loading is overstated by them where it is not the peak anyway.
    return {"weights": moved, "optimizer": -setup.moments_on_device(shape)}


def _streamed_blocks(shape: ModelShape, setup: Setup, count: int) -> int:
    return count * setup.frozen_layer_bytes(shape) // shape.layers if setup.streamed else 0


def _angles(shape: ModelShape, setup: Setup) -> int:
    return 2 * 4 * shape.head_size * setup.row_tokens  # cosine and sine in float32


def _forward(shape: ModelShape, setup: Setup, ranks: _Ranks, rectangles: bool) -> dict[Part, int]:
    t, b = setup.row_tokens, setup.value_bytes
    heads = key_heads_per_pass(shape.heads, shape.key_value_heads, t) if rectangles else shape.key_value_heads
    q, k = heads * shape.heads // shape.key_value_heads * shape.head_size, heads * shape.head_size
    projected = shape.queries + 2 * shape.keys + ranks.qkv
    comes_early = setup.device == "cuda" and t <= SHORT_ROW_TOKENS
    output = shape.vocabulary * shape.hidden * b if comes_early else 0
    merged = 4 * q if rectangles else 0  # wide sums of the queries that several rectangles share
    return {
        "activations": t * shape.hidden * b,
        "attention": t * (projected + q + k + q + shape.queries) * b
        + t * merged // 4  # at most the last bucket and the branches: far from all queries
        + 4 * shape.heads * t
        + _angles(shape, setup),
        "weights": _streamed_blocks(shape, setup, 2) + output,
    }


def _head(shape: ModelShape, setup: Setup) -> dict[Part, int]:
    b = setup.value_bytes
    found: dict[Part, int] = {"activations": setup.row_tokens * shape.hidden * b}
    found["weights"] = shape.vocabulary * shape.hidden * b if setup.device == "cuda" else 0
    found["logits"] = logits_bytes(shape, setup) + setup.target_tokens * shape.hidden * b
    found["attention"] = _angles(shape, setup)
    found["weights"] += _streamed_blocks(shape, setup, 1)
    return found


def logits_bytes(shape: ModelShape, setup: Setup) -> int:
    """Return the bytes of logits and what is made of them: in chunks, overwritten in place where Triton runs.

    Without chunks a plain loss holds, at its worst, 16 bytes a logit: four times float32 (logits, their log-softmax,
    and the gradients of both).
    """
    if setup.chunk_tokens is None:
        return 16 * setup.row_tokens * shape.vocabulary
    chunk = min(setup.chunk_tokens, setup.target_tokens)
    if setup.lean and setup.device == "cuda":
        return chunk * (shape.vocabulary + 3 * shape.hidden) * setup.value_bytes
    wide = 2 * 4 if setup.value_bytes == 4 else 2 * 4 + 2 * setup.value_bytes
    return chunk * shape.vocabulary * wide


def _sums(shape: ModelShape, ranks: _Ranks) -> int:
    """Return the float32 sums of one layer's adapter gradients."""
    d, f, q, k = shape.hidden, shape.intermediate, shape.queries, shape.keys
    return 4 * (ranks.qkv * (d + q + 2 * k) + ranks.out * (q + d) + ranks.gate_up * (d + 2 * f) + ranks.down * (f + d))


def _mlp(shape: ModelShape, setup: Setup, ranks: _Ranks) -> dict[Part, int]:
    b, d, f, q = setup.value_bytes, shape.hidden, shape.intermediate, shape.queries
    t, tile = setup.row_tokens, min(setup.tile_tokens, setup.row_tokens)
    matrices = (d + ranks.out) * (q + ranks.out) + (2 * f + ranks.gate_up) * (d + ranks.gate_up)
    matrices += (d + ranks.down) * (f + ranks.down)
    in_tile = (q + ranks.out) + d + (d + ranks.gate_up) + (2 * f + ranks.gate_up) + (d + ranks.down) + (f + ranks.down)
    again = t * (q + 2 * shape.keys + ranks.qkv) * b if setup.recompute_attention else 0
    return {
        "activations": 2 * t * d * b,
        "attention": 2 * t * q * b + 4 * shape.heads * t + _angles(shape, setup) + again,
        "workspace": (matrices + tile * in_tile) * b,
        "gradients": _sums(shape, ranks),
        "weights": _streamed_blocks(shape, setup, 1),
    }


def _attention(shape: ModelShape, setup: Setup, ranks: _Ranks, rectangles: bool) -> dict[Part, int]:
    b, d, q, k = setup.value_bytes, shape.hidden, shape.queries, shape.keys
    t = setup.row_tokens
    projected = q + 2 * k + ranks.qkv
    key_heads = key_heads_per_pass(shape.heads, shape.key_value_heads, t)
    pass_q = key_heads * shape.heads // shape.key_value_heads * shape.head_size
    pass_k = key_heads * shape.head_size
    kernel = 2 * (pass_q + pass_k) + pass_k  # q, k after RoPE; dq, dk, dv
    wide = 4 * pass_q  # the kernel sums dq in float32
    if rectangles:
        kernel += pass_q + 2 * pass_k  # the part of one rectangle beside the sum over all
        wide += 2 * 4 * pass_k
    lets_go_of_x = key_heads < shape.key_value_heads  # several passes: it comes again after the first half of them
    return {
        "activations": (1 if lets_go_of_x else 2) * t * d * b,
        "attention": t * (2 * q + projected + kernel) * b + t * wide + 4 * shape.heads * t + _angles(shape, setup),
        "workspace": (projected * (d + ranks.qkv)) * b,
        "gradients": _sums(shape, ranks),
        "weights": _streamed_blocks(shape, setup, 1),
    }


def _projection(shape: ModelShape, setup: Setup, ranks: _Ranks) -> dict[Part, int]:
    b, d = setup.value_bytes, shape.hidden
    t, tile = setup.row_tokens, min(setup.tile_tokens, setup.row_tokens)
    projected = shape.queries + 2 * shape.keys + ranks.qkv
    next_attention = 0 if setup.recompute_attention else t * shape.queries * b + 4 * shape.heads * t
    return {
        "activations": 3 * t * d * b,
        "attention": t * projected * b + next_attention + 4 * shape.heads * t + _angles(shape, setup),
        "workspace": (projected * (d + ranks.qkv) + tile * (2 * d + ranks.qkv)) * b,
        "gradients": _sums(shape, ranks),
        "weights": _streamed_blocks(shape, setup, 1),
    }


def _pinned(shape: ModelShape, setup: Setup) -> dict[Part, int]:
    t, b = setup.row_tokens, setup.value_bytes

    def pages(size: int) -> int:
        return -(-size // _PAGE) * _PAGE

    kept = pages(t * shape.hidden * b)
    attention = 0 if setup.recompute_attention else pages(t * shape.queries * b) + pages(4 * shape.heads * t)
    weights = setup.vocabulary_bytes(shape) + (setup.frozen_layer_bytes(shape) if setup.streamed else 0)
    return {
        "weights": weights,
        "optimizer": setup.moments_on_pinned_host(shape),
        "activations": shape.layers * kept,
        "attention": shape.layers * attention,
    }
