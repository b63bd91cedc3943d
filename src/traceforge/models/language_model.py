"""The one forward pass: a row in, the log-probability of each trained token out.

Training, evaluation and the oracles' comparisons all call `LanguageModel.row_logprobs`; nothing else runs the network.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from traceforge.config import MemorySettings, RunConfig
from traceforge.errors import DisagreementError, ModelError
from traceforge.memory.normed_logprobs import normed_logprobs
from traceforge.memory.offload import ActivationStore, Lanes
from traceforge.memory.pinned import Slab
from traceforge.memory.recompute import recompute_layers
from traceforge.memory.token_logprobs import Head, token_logprobs
from traceforge.models import attention
from traceforge.models.adapters import add_adapter
from traceforge.models.lean import LeanNetwork, LeanOptions, why_not_lean
from traceforge.models.load import ModelLocation, load_base
from traceforge.samples.prefix_tree import build_rows
from traceforge.samples.rows import Row
from traceforge.samples.tokens import Sample

Layout = Literal["tree", "packed", "plain"]
Measured = TypeVar("Measured")
_LAYOUTS: tuple[Layout, ...] = ("tree", "packed", "plain")

_SELF_TEST_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest difference of a log-probability in nats that the start-up self-tests accept: far above rounding of the
dtype on a short text, far below what a token that sees the wrong past or a missing soft cap changes."""

_ROWS_SELF_TEST_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 1.0, torch.float16: 0.15}
"""The same for rows against their samples alone, where attention itself sums in another order. On random tokens
SmolLM2-135M in bfloat16 differs by 0.29 nats here (and by 0.52 from its own float32); a token that sees a wrong past or
has a wrong depth moves by 2.6 and more."""


@dataclass
class LanguageModel:
    """A causal language model ready to train or evaluate on rows.

    Args:
        model: the network, with its adapter if there is one.
        device: where it lies.
        dtype: dtype of the arithmetic; trained weights are float32.
        layout: how samples become rows: `tree` shares their prefixes, `packed` lays them side by side, `plain` runs
            each alone through the model's own attention.
        layout_reason: why, for the evidence.
        logits_chunk_tokens: see `token_logprobs`.
        kernels_run: names of the attention kernels that rows have taken so far, for the evidence.
        lean: the same weights on the lean path, if rows take it.
        inputs_on_host: where the generic path's layer inputs wait, if not on the device.
        path_reason: why they do or do not, for the evidence.
    """

    model: nn.Module
    device: torch.device
    dtype: torch.dtype
    layout: Layout = "plain"
    layout_reason: str = ""
    logits_chunk_tokens: int = 512
    kernels_run: set[str] = field(default_factory=set)
    lean: LeanNetwork | None = None
    inputs_on_host: Slab | None = None
    path_reason: str = ""

    @property
    def base(self) -> nn.Module:
        """The Hugging Face model inside."""
        get_base = getattr(self.model, "get_base_model", None)
        return get_base() if get_base is not None else self.model

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trained parameters by name, each once."""
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def rows(self, samples: list[Sample] | tuple[Sample, ...], *, tokens_per_row: int) -> list[Row]:
        """Return the rows this model runs for `samples`, by its layout."""
        if self.layout != "plain":
            return build_rows(samples, tokens_per_row=tokens_per_row, share=self.layout == "tree")
        return [row for sample in samples for row in build_rows([sample], tokens_per_row=tokens_per_row)]

    def effective_attention(self) -> str:
        """Return the layout and the kernels that really run, for the evidence."""
        if self.layout == "plain":
            return f"plain ({self.base.config._attn_implementation})"
        return f"{self.layout} ({', '.join(sorted(self.kernels_run))})"

    def effective_path(self) -> str:
        """Return the path that rows really take, and how, for the evidence."""
        if self.lean is not None:
            return f"lean ({self.lean.describe()})"
        return "generic" if self.inputs_on_host is None else "generic (layers recomputed, their inputs on the host)"

    def host_pinned_bytes(self) -> int | None:
        """Return the page-locked host memory held now, None where no technique uses any."""
        if self.lean is not None:
            return self.lean.host_bytes()
        return None if self.inputs_on_host is None else self.inputs_on_host.num_bytes

    def input_store(self, memory: MemorySettings) -> ActivationStore | None:
        """Return where layer inputs wait if they leave the device, and remember it."""
        if not memory.offload_inputs:
            return None
        budget = None if memory.pinned_gib is None else int(memory.pinned_gib * 2**30)
        self.inputs_on_host = Slab(self.device, "layer inputs", budget)
        return ActivationStore(Lanes(self.device), self.inputs_on_host)

    def row_logprobs(self, row: Row) -> tuple[Tensor, Tensor]:
        """Return log-probability [N] and weight [N] of the row's trained tokens, in row order.

        A token is read at the hidden state of its parent. The gradient reaches every trained parameter.
        """
        targets_N = row.targets_N()
        parents_N = row.parents_T[targets_N]
        assert (parents_N >= 0).all(), "a root token has no parent to be predicted from"
        read = self._lean_logprobs if self.lean is not None else self._generic_logprobs
        logp_N = read(row, self._tensor(parents_N), self._tensor(row.token_ids_T[targets_N]))
        return logp_N, torch.as_tensor(row.weights_T[targets_N], device=self.device)

    def _generic_logprobs(self, row: Row, parents_N: Tensor, target_ids_N: Tensor) -> Tensor:
        hidden_ND = self._hidden(row)[parents_N]
        return token_logprobs(hidden_ND, target_ids_N, self.head(), chunk_tokens=self.logits_chunk_tokens)

    def _lean_logprobs(self, row: Row, parents_N: Tensor, target_ids_N: Tensor) -> Tensor:
        lean = self.lean
        assert lean is not None
        tasks = lean.tasks(row.paths)
        self.kernels_run |= {task.kernel.name for task in tasks}
        hidden_TD = lean.hidden_states(self._tensor(row.token_ids_T), self._tensor(row.depths_T), tasks)
        head = replace(self.head(), weight_VD=lean.output.whole())
        return normed_logprobs(
            hidden_TD, parents_N, target_ids_N, head, lean.final_norm, chunk_tokens=self.logits_chunk_tokens
        )

    def head(self) -> Head:
        """Return the output layer as it is now (its weights may be trained)."""
        layer = self.base.get_output_embeddings()
        if not isinstance(layer, nn.Linear) or type(layer).__name__ == "Linear4bit":
            raise ModelError(f"the output layer is a {type(layer).__name__}, which is not supported as a head")
        config = self.base.config
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1)
        softcap = getattr(config, "final_logit_softcapping", None)
        return Head(layer.weight, layer.bias, scale, None if softcap is None else float(softcap), self.dtype)

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Return the autocast context of `dtype`; float32 and wider need none."""
        if self.dtype in (torch.bfloat16, torch.float16):
            return torch.autocast(self.device.type, dtype=self.dtype)
        return nullcontext()

    def _hidden(self, row: Row) -> Tensor:
        if self.layout == "plain":  # each tree is one path here, and runs alone
            assert row.num_forks == 0, "the plain layout shares nothing"
            return torch.cat([self._run(row, slice(path.start, path.stop), {}) for path in row.paths])
        return self._run(row, slice(None), {attention.LAYOUT_KEYWORD: self._layout_of(row)})

    def _run(self, row: Row, part: slice, layout: dict[str, Any]) -> Tensor:
        """Return the hidden states [T, D] of a part of a row after the final norm."""
        with self.arithmetic():
            output = self.base.base_model(
                input_ids=self._tensor(row.token_ids_T[part])[None],
                position_ids=self._tensor(row.depths_T[part])[None],
                use_cache=False,
                **layout,
            )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def _layout_of(self, row: Row) -> attention.RowLayout:
        config = self.base.config
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layout = attention.layout_of(row, self.device, self.dtype, head_size)
        self.kernels_run |= layout.kernels()
        return layout

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, device=self.device)


def load_language_model(config: RunConfig, location: ModelLocation, device: torch.device) -> LanguageModel:
    """Return the model of a run: base, adapter, attention and head checked on the loaded weights.

    Raises:
        ModelError: see `load_base` and `add_adapter`; or a request that this model cannot honour.
        DisagreementError: the self-test of the head fails, or that of the attention when `tree` was asked for.
    """
    base = load_base(location, config.model, config.adapter, str(device))
    if config.adapter.kind == "lora":
        network = add_adapter(base, config.adapter, seed=config.training.seed)
    else:
        network = base.requires_grad_(True)
    limit = getattr(base.config, "max_position_embeddings", None)
    if limit is not None and config.data.max_tokens > limit:
        raise ModelError(
            f"data.max_tokens is {config.data.max_tokens}, {location.id} has {limit} positions",
            hint="lower data.max_tokens or use a model with longer positions",
        )
    dtype = getattr(torch, config.model.dtype)
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ModelError(
            f"model.dtype = 'bfloat16': {torch.cuda.get_device_name(device)} has no bfloat16",
            hint="set model.dtype = 'float16' (its loss is scaled automatically) or 'float32'",
        )
    language_model = LanguageModel(network, device, dtype, logits_chunk_tokens=config.memory.logits_chunk_tokens)
    check_head(language_model)
    choose_layout(language_model, config.model.attention)
    if config.memory.recompute_layers:
        layers = getattr(base.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(
                f"memory.recompute_layers: {type(base).__name__} has no list `layers`",
                hint="set memory.recompute_layers = false",
            )
        recompute_layers(layers, language_model.input_store(config.memory))
    choose_path(language_model, config.memory)
    return language_model


def choose_path(model: LanguageModel, memory: MemorySettings) -> None:
    """Put rows on the lean path where that is asked for, or is admitted and pays (on a GPU).

    A small tree is run on both paths first: on the loaded weights they must agree.

    Raises:
        ModelError: the lean path, or a setting that only it honours, was asked for and the model does not admit it.
        DisagreementError: the two paths differ by more than rounding.
    """
    needs_lean = memory.path == "lean" or memory.placement == "streamed" or memory.recompute_attention
    refusal = why_not_lean(model.model)
    if refusal is None and model.layout == "plain":
        refusal = f"samples run in the plain layout ({model.layout_reason})"
    if refusal is None and memory.recompute_layers:
        refusal = "memory.recompute_layers = true"
    if refusal is not None and needs_lean:
        raise ModelError(
            f"memory.path = {memory.path!r}, memory.placement = {memory.placement!r}, memory.recompute_attention = "
            f"{memory.recompute_attention} need the lean path: {refusal}",
            hint="set memory.path = 'generic', memory.placement = 'resident' and memory.recompute_attention = false",
        )
    if refusal is None and not needs_lean and (memory.path == "generic" or model.device.type != "cuda"):
        refusal = "asked for" if memory.path == "generic" else f"the lean path pays on a GPU, this is {model.device}"
    if refusal is not None:
        model.path_reason = refusal
        return
    options = LeanOptions(
        placement=memory.placement,
        recompute_attention=memory.recompute_attention,
        tile_tokens=memory.tile_tokens,
        pinned_bytes=None if memory.pinned_gib is None else int(memory.pinned_gib * 2**30),
    )
    generic = _quietly(model, _probe_logprobs)
    model.lean = LeanNetwork(model.model, model.device, model.dtype, options)
    difference = float((_quietly(model, _probe_logprobs) - generic).abs().max())
    limit = _ROWS_SELF_TEST_TOLERANCE.get(model.dtype, 2e-4)
    if not difference <= limit:
        raise DisagreementError(
            f"the lean path differs from the model's own layers by {difference:.1e} nats (limit {limit:.0e})",
            hint="set memory.path = 'generic'",
        )
    model.path_reason = f"self-test: {difference:.1e} nats from the generic path (limit {limit:.0e})"


def choose_layout(model: LanguageModel, requested: Layout | Literal["auto"]) -> None:
    """Set how samples become rows, after a self-test on the loaded weights: a small tree against its samples alone.

    `auto` takes the first of tree, packed and plain that this model admits, and says why the others were not it.

    Raises:
        DisagreementError: the layout that was asked for cannot be honoured; the message says why.
    """
    refusals: list[str] = []
    for layout in _LAYOUTS if requested == "auto" else (requested,):
        refusal, said = _try_layout(model, layout)
        if refusal is None:
            model.layout, model.layout_reason = layout, "; ".join([*refusals, said])
            return
        refusals.append(f"not {layout}: {refusal}")
    raise DisagreementError(
        f"model.attention = {requested!r} cannot be honoured, {refusals[0]}",
        hint="set model.attention = 'plain' (one sample a row) or 'auto'",
    )


def _try_layout(model: LanguageModel, layout: Layout) -> tuple[str | None, str]:
    """Put the model into a layout and return why that is refused (None if not), and what to say of it."""
    model.layout = layout
    if layout == "plain":
        model.base.set_attn_implementation("sdpa")
        return None, "one sample a row, through the model's own attention"
    refusal = attention.why_not_rows(model.base.config)
    dropout = max((each.p for each in model.model.modules() if isinstance(each, nn.Dropout)), default=0.0)
    if refusal is None and layout == "tree" and dropout:
        refusal = f"dropout ({dropout}) makes the same token differ from sample to sample"
    if refusal is not None:
        return refusal, ""
    attention.register()
    model.base.set_attn_implementation(attention.NAME)
    limit = _ROWS_SELF_TEST_TOLERANCE.get(model.dtype, 2e-4)
    try:
        difference = _quietly(model, _rows_against_alone)
    except (TypeError, AssertionError, KeyError, ValueError) as error:
        return f"the model does not take the row layout: {error}", ""
    said = f"self-test of a small {layout} row: {difference:.1e} nats from its samples alone (limit {limit:.0e})"
    return (None, said) if difference <= limit else (said, said)


def check_head(model: LanguageModel) -> float:
    """Return the largest difference in nats between our log-probabilities and the model's own full logits.

    Raises:
        DisagreementError: they differ by more than rounding, so this head does something we do not know of.
    """
    difference = _quietly(model, _head_against_logits)
    tolerance = _SELF_TEST_TOLERANCE.get(model.dtype, 2e-4)
    if not difference <= tolerance:
        raise DisagreementError(
            f"log-probabilities differ from the model's own logits by {difference:.1e} nats (limit {tolerance:.0e}): "
            f"the output layer of {type(model.base).__name__} is not one this version knows",
        )
    return difference


def _head_against_logits(model: LanguageModel) -> float:
    sample = _probe(0, _probe_ids(model, 12, seed=0))
    (row,) = build_rows([sample], tokens_per_row=sample.num_tokens)
    ours_N, _ = model.row_logprobs(row)
    with model.arithmetic():
        logits_TV = model.model(input_ids=torch.as_tensor(row.token_ids_T, device=model.device)[None]).logits[0]
    theirs_N = logits_TV.float().log_softmax(-1)[:-1].gather(1, model._tensor(row.token_ids_T[1:])[:, None])[:, 0]
    return float((ours_N - theirs_N).abs().max())


def _rows_against_alone(model: LanguageModel) -> float:
    """Compare the probe row with each of its samples alone."""
    row, probes = _probe_row(model)
    size = row.num_tokens
    together_N, _ = model.row_logprobs(row)
    by_position = dict(zip(row.targets_N().tolist(), together_N.tolist(), strict=True))
    worst = 0.0
    for probe in probes:
        (alone,) = build_rows([probe], tokens_per_row=size)
        apart_N, _ = model.row_logprobs(alone)
        positions = row.sample_positions_S(row.sample_ids.index(probe.sample_id))[1:]
        worst = max(worst, *(abs(by_position[int(t)] - p) for t, p in zip(positions, apart_N.tolist(), strict=True)))
    return worst


def _probe_logprobs(model: LanguageModel) -> Tensor:
    return model.row_logprobs(_probe_row(model)[0])[0]


def _probe_row(model: LanguageModel) -> tuple[Row, list[Sample]]:
    """Return a row of five samples (two levels of forks, one inside another, a second tree), and the samples."""
    trunk, branch, twig, other = (_probe_ids(model, length, seed) for seed, length in enumerate((9, 6, 4, 7)))
    endings: tuple[Any, ...] = ([], branch, np.concatenate([branch[:3], twig]), twig, None)
    probes = [
        _probe(number, other if ending is None else np.concatenate([trunk, ending]).astype(np.int64))
        for number, ending in enumerate(endings)
    ]
    size = sum(probe.num_tokens for probe in probes)
    (row,) = build_rows(probes, tokens_per_row=size, share=model.layout == "tree")
    return row, probes


def _probe_ids(model: LanguageModel, length: int, seed: int) -> np.ndarray:
    vocabulary = model.base.config.vocab_size
    return np.random.default_rng(seed).integers(0, vocabulary, length)


def _probe(number: int, ids_S: np.ndarray) -> Sample:
    weights_S = np.ones(len(ids_S))
    weights_S[0] = 0.0
    return Sample(f"probe#{number}", f"probe#{number}", "probe", ids_S, weights_S)


def _quietly(model: LanguageModel, measure: Callable[[LanguageModel], Measured]) -> Measured:
    """Run `measure` without gradients or dropout and put the training flags back."""
    flags = [(module, module.training) for module in model.model.modules()]
    model.model.eval()
    try:
        with torch.no_grad():
            return measure(model)
    finally:
        for module, flag in flags:
            module.training = flag
