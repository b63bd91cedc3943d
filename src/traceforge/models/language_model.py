"""The one forward pass: a row in, the log-probability of each trained token out.

Training, evaluation and the oracles' comparisons all call `LanguageModel.row_logprobs`; nothing else runs the network.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from traceforge.config import RunConfig
from traceforge.errors import DisagreementError, ModelError
from traceforge.memory.recompute import recompute_layers
from traceforge.memory.token_logprobs import Head, token_logprobs
from traceforge.models import attention
from traceforge.models.adapters import add_adapter
from traceforge.models.load import ModelLocation, load_base
from traceforge.samples.rows import Row, build_rows
from traceforge.samples.tokens import Sample

_SELF_TEST_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest difference of a log-probability in nats that the start-up self-tests accept: far above rounding of the
dtype on a short text, far below what a token that sees the wrong past or a missing soft cap changes."""


@dataclass
class LanguageModel:
    """A causal language model ready to train or evaluate on rows.

    Args:
        model: the network, with its adapter if there is one.
        device: where it lies.
        dtype: dtype of the arithmetic; trained weights are float32.
        tree: several samples may stand in one row.
        tree_reason: why `tree` is what it is, for the evidence.
        logits_chunk_tokens: see `token_logprobs`.
    """

    model: nn.Module
    device: torch.device
    dtype: torch.dtype
    tree: bool
    tree_reason: str
    logits_chunk_tokens: int = 512

    @property
    def base(self) -> nn.Module:
        """The Hugging Face model inside."""
        get_base = getattr(self.model, "get_base_model", None)
        return get_base() if get_base is not None else self.model

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trained parameters by name, each once."""
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def rows(self, samples: list[Sample] | tuple[Sample, ...], *, tokens_per_row: int) -> list[Row]:
        """Return the rows this model can run for `samples`: packed, or one sample each on the plain path."""
        if self.tree:
            return build_rows(samples, tokens_per_row=tokens_per_row)
        return [row for sample in samples for row in build_rows([sample], tokens_per_row=tokens_per_row)]

    def row_logprobs(self, row: Row) -> tuple[Tensor, Tensor]:
        """Return log-probability [N] and weight [N] of the row's trained tokens, in row order.

        A token is read at the hidden state of its parent. The gradient reaches every trained parameter.
        """
        targets_N = row.targets_N()
        parents_N = row.parents_T[targets_N]
        assert (parents_N >= 0).all(), "a root token has no parent to be predicted from"
        hidden_TD = self._hidden(row)
        hidden_ND = hidden_TD[self._tensor(parents_N)]
        target_ids_N = self._tensor(row.token_ids_T[targets_N])
        logp_N = token_logprobs(hidden_ND, target_ids_N, self.head(), chunk_tokens=self.logits_chunk_tokens)
        return logp_N, torch.as_tensor(row.weights_T[targets_N], device=self.device)

    def head(self) -> Head:
        """Return the output layer as it is now (its weights may be trained)."""
        layer = self.base.get_output_embeddings()  # type: ignore[operator]
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
        assert self.tree or len(row.paths) == 1, "the plain path takes one sample a row"
        layout = {attention.LAYOUT_KEYWORD: row.paths} if self.tree else {}
        with self.arithmetic():
            output = self.base.base_model(
                input_ids=self._tensor(row.token_ids_T)[None],
                position_ids=self._tensor(row.depths_T)[None],
                use_cache=False,
                **layout,
            )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

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
    language_model = LanguageModel(
        network, device, dtype, tree=False, tree_reason="", logits_chunk_tokens=config.memory.logits_chunk_tokens
    )
    check_head(language_model)
    choose_attention(language_model, config.model.attention, max_tokens=config.data.max_tokens)
    if config.memory.recompute_layers:
        layers = getattr(base.base_model, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(
                f"memory.recompute_layers: {type(base).__name__} has no list `layers`",
                hint="set memory.recompute_layers = false",
            )
        recompute_layers(layers)
    return language_model


def choose_attention(model: LanguageModel, requested: str, *, max_tokens: int) -> None:
    """Set how rows run, after a self-test on the loaded weights: two short samples in one row against each alone.

    Raises:
        DisagreementError: `requested` is "tree" and this model cannot, or does not agree with itself.
    """
    if requested == "plain":
        model.base.set_attn_implementation("sdpa")  # type: ignore[operator]
        model.tree, model.tree_reason = False, "asked for by model.attention"
        return
    reason = attention.why_not_tree(model.base.config, max_tokens=max_tokens)
    if reason is None:
        attention.register()
        model.base.set_attn_implementation(attention.NAME)  # type: ignore[operator]
        model.tree = True
        try:
            difference = _quietly(model, _packed_against_alone)
        except (TypeError, AssertionError, KeyError, ValueError) as error:
            reason = f"the model does not take the row layout: {error}"
        else:
            tolerance = _SELF_TEST_TOLERANCE.get(model.dtype, 2e-4)
            if difference <= tolerance:
                model.tree_reason = f"self-test: {difference:.1e} nats between packed and alone (limit {tolerance:.0e})"
                return
            reason = f"self-test: {difference:.1e} nats between packed and alone (limit {tolerance:.0e})"
    if requested == "tree":
        raise DisagreementError(
            f"model.attention = 'tree' cannot be honoured: {reason}",
            hint="set model.attention = 'plain' (one sample a row) or 'auto'",
        )
    model.base.set_attn_implementation("sdpa")  # type: ignore[operator]
    model.tree, model.tree_reason = False, reason


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
    sample = _probe(model, length=12, seed=0)
    (row,) = build_rows([sample], tokens_per_row=sample.num_tokens)
    ours_N, _ = model.row_logprobs(row)
    with model.arithmetic():
        logits_TV = model.model(input_ids=torch.as_tensor(row.token_ids_T, device=model.device)[None]).logits[0]
    theirs_N = logits_TV.float().log_softmax(-1)[:-1].gather(1, model._tensor(row.token_ids_T[1:])[:, None])[:, 0]
    return float((ours_N - theirs_N).abs().max())


def _packed_against_alone(model: LanguageModel) -> float:
    probes = [_probe(model, length=length, seed=seed) for seed, length in enumerate((17, 9))]
    (packed,) = build_rows(probes, tokens_per_row=26)
    alone = [build_rows([probe], tokens_per_row=26)[0] for probe in probes]
    together_N, _ = model.row_logprobs(packed)
    apart_N = torch.cat([model.row_logprobs(row)[0] for row in alone])
    return float((together_N - apart_N).abs().max())


def _probe(model: LanguageModel, *, length: int, seed: int) -> Sample:
    vocabulary = model.base.get_input_embeddings().weight.shape[0]  # type: ignore[operator,union-attr]
    ids_S = np.random.default_rng(seed).integers(0, vocabulary, length)
    weights_S = np.ones(length)
    weights_S[0] = 0.0
    return Sample(f"probe#{seed}", f"probe#{seed}", "probe", ids_S, weights_S)


def _quietly(model: LanguageModel, measure: Callable[[LanguageModel], float]) -> float:
    """Run `measure` without gradients or dropout and put the training flags back."""
    flags = [(module, module.training) for module in model.model.modules()]
    model.model.eval()
    try:
        with torch.no_grad():
            return measure(model)
    finally:
        for module, flag in flags:
            module.training = flag
