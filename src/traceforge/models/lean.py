"""The lean path of a whole model: which models it admits, and how their modules become `layers.py`'s plain parts.

Nothing of the Hugging Face forward runs on this path: embedding, RoPE's angles and the final norm's weight are taken
from its modules, the layers are `LeanLayers`. The adapter's parameters stay the model's own, so optimizers,
checkpoints and saving see no difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from traceforge.errors import ModelError
from traceforge.lean_sizes import RANK_MULTIPLE, SHORT_ROW_TOKENS
from traceforge.memory.folded_linear import AdaptedLinear, FoldedLinear
from traceforge.memory.host_table import HostTable
from traceforge.memory.layer_maths import name_of_kernels
from traceforge.memory.offload import ActivationStore, Lanes
from traceforge.memory.pinned import Slab
from traceforge.memory.weights import DenseWeight, FrozenWeight, LayerWeights, Nf4Weight
from traceforge.models import attention
from traceforge.models.kernels import Task, assign_kernels
from traceforge.models.layer_parts import LayerParts, LayerShape, Norm, plan_row
from traceforge.models.layers import LeanLayers
from traceforge.samples.rows import Path, attention_pieces

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LeanOptions:
    """How the lean path uses memory; see `config.MemorySettings`. `pinned_bytes`: None = no limit."""

    placement: Literal["resident", "streamed"] = "resident"
    recompute_attention: bool = False
    tile_tokens: int = 4096
    pinned_bytes: int | None = None
    vocabulary_on_host: bool = True


def why_not_lean(network: nn.Module) -> str | None:
    """Return why a model, adapter included, has no lean path, or None."""
    base = _base_of(network)
    if base.config.model_type not in FAMILIES:
        return f"{base.config.model_type} has no lean layers (families that have: {', '.join(FAMILIES)})"
    if (refusal := attention.why_not_rows(base.config) or _why_not_shape(base)) is not None:
        return refusal
    for name, table in (("embedding", base.get_input_embeddings()), ("output layer", base.get_output_embeddings())):
        if type(table) not in (nn.Embedding, nn.Linear):  # an adapter, or a copy to be trained, would be passed over
            return f"the {name} is a {type(table).__name__}"
    refusals = (_why_not_linear(name, module) for name, module in _linears(base))
    return next((each for each in refusals if each is not None), None) or _why_not_trained(network, base)


def _why_not_shape(base: Any) -> str | None:
    size = _head_size(base.config)
    turned = 2 * base.base_model.rotary_emb.inv_freq.numel()
    if base.config.hidden_act != "silu":
        return f"activation {base.config.hidden_act!r}: its MLP is not SwiGLU"
    if size % 8:
        return f"heads of {size} values: attention kernels want a multiple of 8"
    return None if turned == size else f"RoPE turns {turned} of {size} values of a head"


def _why_not_linear(name: str, module: nn.Module) -> str | None:
    inner = getattr(module, "base_layer", module)
    state = getattr(inner.weight, "quant_state", None) if type(inner).__name__ == "Linear4bit" else None
    if type(inner).__name__ == "Linear4bit":
        if state is None or state.quant_type != "nf4":
            found = "not quantised yet: move the model to its device first" if state is None else state.quant_type
            return f"{name} is not NF4 ({found})"
    elif type(inner) is not nn.Linear:
        return f"{name} is a {type(inner).__name__}, neither a plain linear nor an NF4 one"
    return None if inner is module else _why_not_adapter(name, module)


def _why_not_adapter(name: str, module: Any) -> str | None:
    if len(module.active_adapters) != 1 or module.merged or module.disable_adapters:
        return f"{name} has not exactly one active, unmerged adapter"
    adapter = module.active_adapters[0]
    if adapter not in getattr(module, "lora_A", ()):
        return f"{name} has an adapter that is not LoRA"
    extras = {
        "a variant of LoRA (DoRA or another)": getattr(module, "use_dora", {}).get(adapter, False)
        or adapter in getattr(module, "lora_variant", {}),
        "a LoRA bias": module.lora_A[adapter].bias is not None or module.lora_B[adapter].bias is not None,
        "a transposed weight": getattr(module, "fan_in_fan_out", False),
        "adapter dropout": not isinstance(module.lora_dropout[adapter], nn.Identity),
    }
    return next((f"{name} has {extra}" for extra, present in extras.items() if present), None)


def _why_not_trained(network: nn.Module, base: nn.Module) -> str | None:
    known = {id(p) for _, module in _linears(base) for p in _adapter_parameters(module)}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            return f"{name} is trained; the lean path trains LoRA on {', '.join(_ATTENTION_LINEARS + _MLP_LINEARS)}"
    return None


def _adapter_parameters(module: nn.Module) -> Iterable[nn.Parameter]:
    if hasattr(module, "lora_A"):
        for adapter in module.active_adapters:
            if adapter in module.lora_A:
                yield module.lora_A[adapter].weight
                yield module.lora_B[adapter].weight


def _base_of(network: nn.Module) -> Any:
    get_base = getattr(network, "get_base_model", None)
    return get_base() if get_base is not None else network


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _linears(base: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    for number, layer in enumerate(base.base_model.layers):
        for part, names in (("self_attn", _ATTENTION_LINEARS), ("mlp", _MLP_LINEARS)):
            for name in names:
                yield f"layers.{number}.{part}.{name}", getattr(getattr(layer, part), name)


class LeanNetwork:
    """A model of an admitted family on the lean path.

    Args:
        network: the model with its adapter; its frozen weights move to where `options` says.
        device: where it computes.
        dtype: dtype of the arithmetic.

    Raises:
        ModelError: `why_not_lean`.
        HostMemoryError: the weights or tables do not fit into page-locked memory.
    """

    def __init__(self, network: nn.Module, device: torch.device, dtype: torch.dtype, options: LeanOptions) -> None:
        if (refusal := why_not_lean(network)) is not None:
            raise ModelError(f"no lean path: {refusal}", hint="set memory.path = 'generic' or 'auto'")
        base = _base_of(network)
        config = base.config
        self.device, self.dtype, self.options = device, dtype, options
        self.shape = LayerShape(
            hidden=config.hidden_size,
            mlp=config.intermediate_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_size=_head_size(config),
            scale=float(base.base_model.layers[0].self_attn.scaling),
        )
        layers = [self._parts(layer) for layer in base.base_model.layers]
        weights_of_all = [weight for layer in layers for weight in layer.weights()]
        self.quantized_bytes = sum(w.parts[0].numel() for w in weights_of_all if isinstance(w, Nf4Weight))
        self.layer_class = type(base.base_model.layers[0]).__name__
        self.lanes = Lanes(device)
        self.weights_slab = Slab(device, "streamed weights", options.pinned_bytes)
        streamed = self.weights_slab if options.placement == "streamed" else None
        weights = LayerWeights([layer.weights() for layer in layers], self.lanes, streamed)
        if streamed is not None:
            _empty_linears(base)
        self.activations_slab = Slab(device, "activations", self._budget_left())
        store = ActivationStore(self.lanes, self.activations_slab)
        self.layers = LeanLayers(self.shape, layers, weights, store, dtype)
        self.rotary = base.base_model.rotary_emb
        self.final_norm = _norm(base.base_model.norm)
        self._take_vocabulary(base, options.vocabulary_on_host and device.type == "cuda")

    def _budget_left(self) -> int | None:
        budget = self.options.pinned_bytes
        return None if budget is None else budget - self.weights_slab.num_bytes

    def _parts(self, layer: Any) -> LayerParts:
        block, mlp = layer.self_attn, layer.mlp
        narrow = self.device.type == "cuda" and self.dtype.itemsize == 2
        multiple = RANK_MULTIPLE if narrow else 1

        def folded(*modules: nn.Module) -> FoldedLinear:
            return FoldedLinear([_adapted(each) for each in modules], self.dtype, rank_multiple=multiple)

        return LayerParts(
            qkv=folded(block.q_proj, block.k_proj, block.v_proj),
            out=folded(block.o_proj),
            gate_up=folded(mlp.gate_proj, mlp.up_proj),
            down=folded(mlp.down_proj),
            input_norm=_norm(layer.input_layernorm),
            mlp_norm=_norm(layer.post_attention_layernorm),
            query_norm=_norm(block.q_norm) if hasattr(block, "q_norm") else None,
            key_norm=_norm(block.k_norm) if hasattr(block, "k_norm") else None,
        )

    def _take_vocabulary(self, base: nn.Module, to_host: bool) -> None:
        """Hold embedding and output layer as tables (one table if they are tied)."""
        embedding, output = base.get_input_embeddings(), base.get_output_embeddings()
        tied = embedding.weight.data_ptr() == output.weight.data_ptr()
        self.embedding = HostTable(embedding.weight, self.device, to_host=to_host, purpose="the embedding")
        self.output = self.embedding
        if not tied:
            self.output = HostTable(output.weight, self.device, to_host=to_host, purpose="the output layer")
        if to_host:
            for module in (embedding, output):
                module.weight.data = module.weight.data.new_empty(0)

    def hidden_states(self, token_ids_T: Tensor, depths_T: Tensor, tasks: tuple[Task, ...]) -> Tensor:
        """Return the hidden states [T, D] of a row after the last layer, before the final norm."""
        if token_ids_T.shape[0] <= SHORT_ROW_TOKENS:  # a longer one hides the copy's time, and needs the room itself
            self.output.prefetch(self.lanes)
        with torch.autocast(self.device.type, enabled=False):
            hidden_TD = self.embedding.rows(token_ids_T).to(self.dtype)
            wide = torch.empty(0, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
            cos_1TK, sin_1TK = self.rotary(wide, depths_T[None])
            row = plan_row(
                self.shape,
                tasks,
                (cos_1TK[0], sin_1TK[0]),
                tile_tokens=self.options.tile_tokens,
                recompute=self.options.recompute_attention,
            )
            return self.layers.run(hidden_TD, row)

    def tasks(self, paths: tuple[Path, ...]) -> tuple[Task, ...]:
        """Return attention's rectangles of a row with the kernel of each."""
        return assign_kernels(attention_pieces(paths), self.device, self.dtype, self.shape.head_size)

    def host_bytes(self) -> int:
        """Return the page-locked bytes held now: weights, activations and tables."""
        tables = {id(each): each.host_bytes for each in (self.embedding, self.output)}
        return self.weights_slab.num_bytes + self.activations_slab.num_bytes + sum(tables.values())

    def describe(self) -> str:
        """Return what runs, for the evidence."""
        layers = f"{len(self.layers.layers)} x {self.layer_class}"
        attention_kept = "recomputed" if self.options.recompute_attention else "kept on the host"
        return (
            f"{layers}, {str(self.dtype).removeprefix('torch.')}, weights {self.options.placement}, attention outputs "
            f"{attention_kept}, tiles of {self.options.tile_tokens} tokens, {name_of_kernels(self.device)} kernels"
        )


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), float(module.variance_epsilon))


def _adapted(module: Any) -> AdaptedLinear:
    inner = getattr(module, "base_layer", module)
    weight: FrozenWeight
    if type(inner).__name__ == "Linear4bit":
        weight = Nf4Weight(inner.weight.data, inner.weight.quant_state)
    else:
        weight = DenseWeight(inner.weight)
    if inner is module:
        return AdaptedLinear(weight, inner.bias)
    name = module.active_adapters[0]
    adapter = (module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name]))
    return AdaptedLinear(weight, inner.bias, adapter)


def _empty_linears(base: nn.Module) -> None:
    """Let go of the layers' weights in their modules: they lie in the slab now."""
    for _, module in _linears(base):
        inner: Any = getattr(module, "base_layer", module)
        state = getattr(inner.weight, "quant_state", None)
        inner.weight.data = inner.weight.data.new_empty(0)
        if state is not None:
            state.absmax = state.absmax.new_empty(0)
            if state.state2 is not None:
                state.state2.absmax = state.state2.absmax.new_empty(0)
