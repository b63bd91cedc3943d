"""What the model's own layers hold: Hugging Face's modules with PEFT's adapters under autograd, heads in chunks.

Counted per token of a layer (values of the dtype of the arithmetic; D hidden, Q and K width of all query and key heads,
F MLP, H heads, r rank): autograd keeps

    4 D   layer input, both norms' outputs, the sum after attention           2 K   k after RoPE, v
    3 Q   q after RoPE, attention's output, and that output laid out again    4 F   gate, silu(gate), up, their product
    r     the inner state of each adapter                                     H     log-sum-exp in float32

and in 16 bits both norms' inputs again in float32. With recomputed layers all of it exists for one layer at a time, and
each layer's input for all of them.

CPU      glibc's heap does not use an aligned block again for one of the same size, so a layer leaves about as much
         behind as autograd keeps of one but its input (measured: within 8%), for blocks below 32 MiB; larger ones go
         back to the system. MALLOC_MMAP_THRESHOLD_ lowers that limit: less memory, a fifth to a third more time.
"""

from __future__ import annotations

from traceforge.planning.budget import CPU_PROCESS, CUDA_PROCESS
from traceforge.planning.lean_path import logits_bytes
from traceforge.planning.ledger import Ledger, Part, moment
from traceforge.planning.setup import Setup
from traceforge.samples.model_shape import ModelShape


def generic_ledger(shape: ModelShape, setup: Setup) -> Ledger:
    """Return what a run through the model's own layers holds."""
    trained = setup.trained_parameters(shape)
    frozen = setup.frozen_layer_bytes(shape) + setup.vocabulary_bytes(shape) + setup.small_bytes(shape)
    fixed: dict[Part, int] = {"weights": frozen, "optimizer": setup.moments_on_device(shape)}
    if setup.rank is None:
        fixed["weights"] += 4 * trained
    else:
        fixed["adapter"] = 4 * trained
    if setup.device == "cpu":
        fixed |= {"process": CPU_PROCESS, "workspace": _left_in_heap(shape, setup)}
    gradients: dict[Part, int] = {"gradients": 4 * trained}
    kept = _kept(shape, setup)
    moments = (
        moment("log-probabilities", fixed, {} if setup.single_row else gradients, kept, _head(shape, setup)),
        moment("backward, one layer", fixed, gradients, kept, _one_layer(shape, setup)),
        moment("optimizer", fixed, gradients, {"workspace": setup.optimizer_workspace(shape)}),
    )
    if setup.device == "cpu":
        return Ledger(moments)
    pinned: dict[Part, int] = {"optimizer": setup.moments_on_pinned_host(shape)}
    if setup.inputs_on_host:
        pinned["activations"] = _layer_input(shape, setup) * shape.layers
    return Ledger(moments, pinned, {"process": CUDA_PROCESS})


def layer_bytes(shape: ModelShape, setup: Setup) -> tuple[int, int]:
    """Return what autograd keeps of one layer: bytes of attention, and all other bytes."""
    t, b = setup.row_tokens, setup.value_bytes
    attention = t * (3 * shape.queries + 2 * shape.keys) * b + 4 * shape.heads * t
    if setup.score_matrix:
        attention += 2 * shape.heads * t * t * b  # scores, and their softmax
    others = t * (4 * shape.hidden + 4 * shape.intermediate + (setup.rank or 0) * len(setup.targets)) * b
    if b == 2:
        others += 2 * 4 * t * shape.hidden
    if setup.rank is None:
        others += 2 * t * shape.hidden * b  # trained norms keep what they scale
    return attention, others


def _kept(shape: ModelShape, setup: Setup) -> dict[Part, int]:
    """Return what the forward pass leaves for the backward pass."""
    # Trained weights are float32; autocast keeps a narrow copy of each for the backward pass.
    narrow = setup.value_bytes * shape.linear_parameters() if setup.rank is None and setup.value_bytes < 4 else 0
    if setup.recompute_layers:
        away = setup.inputs_on_host and setup.device == "cuda"  # this layer's and the next one's are on the card
        return {"activations": (2 if away else shape.layers) * _layer_input(shape, setup), "weights": narrow}
    attention, others = layer_bytes(shape, setup)
    return {"attention": shape.layers * attention, "activations": shape.layers * others, "weights": narrow}


def _layer_input(shape: ModelShape, setup: Setup) -> int:
    return setup.row_tokens * shape.hidden * setup.value_bytes


def _one_layer(shape: ModelShape, setup: Setup) -> dict[Part, int]:
    """Return what one layer's backward adds: its recomputed inside, and gradients of its largest values."""
    t, b = setup.row_tokens, setup.value_bytes
    found: dict[Part, int] = {"workspace": t * (3 * shape.intermediate + 2 * shape.hidden) * b}
    if setup.nf4:
        found["workspace"] += shape.intermediate * shape.hidden * b  # one linear, dequantised
    if setup.recompute_layers:
        found["attention"], found["activations"] = layer_bytes(shape, setup)
    return found


def _head(shape: ModelShape, setup: Setup) -> dict[Part, int]:
    derivative = setup.target_tokens * shape.hidden * 4
    return {"logits": logits_bytes(shape, setup) + derivative, "activations": setup.row_tokens * shape.hidden * 4}


def _left_in_heap(shape: ModelShape, setup: Setup) -> int:
    """Return what freed blocks of the layers leave in the C library's heap, beside what is held in it anyway."""
    adapters = (setup.rank or 0, len(setup.targets))
    blocks = ((shape.hidden, 3), (shape.queries, 3), (shape.keys, 2), (shape.intermediate, 4), adapters)
    sizes = ((setup.row_tokens * width * setup.value_bytes, count) for width, count in blocks)
    of_a_layer = sum(count * size for size, count in sizes if size < setup.heap_block_bytes)
    # With recomputed layers the one that is held takes the place of one that was left.
    return (shape.layers - setup.recompute_layers) * of_a_layer
