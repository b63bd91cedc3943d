"""The lean path for other trainers: one call makes a PEFT model lean, and Trainer or TRL's SFTTrainer trains it as is.

    from traceforge.models.drop_in import make_lean

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(...), LoraConfig(...))
    make_lean(model)
    SFTTrainer(model, ...).train()

What changes  The decoder (`model.model`) runs a batch as one row of `layers.py`, each sequence a path of its own:
              padding is not computed. With labels the loss is formed in chunks and no logits are returned. The
              adapter's parameters stay the same objects: optimizers, checkpoints and `save_pretrained` as ever.
              The first token of a sequence has no parent and is never a target, whatever its label.
What is not   Generation and anything else that needs a cache, `inputs_embeds`, masks of more than two dimensions, or
              hidden states of every layer: named errors.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from traceforge.errors import ModelError
from traceforge.memory.layer_maths import rms_norm, rms_norm_backward_
from traceforge.memory.normed_logprobs import normed_logprobs
from traceforge.memory.token_logprobs import Head
from traceforge.models.lean import LeanNetwork, LeanOptions
from traceforge.samples.rows import Path

_IGNORED = -100
_REFUSED = ("inputs_embeds", "past_key_values", "cache", "output_hidden_states", "output_attentions")


def make_lean(
    model: nn.Module,
    *,
    placement: Literal["resident", "streamed"] = "resident",
    recompute_attention: bool = False,
    tile_tokens: int = 4096,
    pinned_gib: float | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Put a PEFT model (LoRA on Llama, Mistral, Qwen2 or Qwen3) on the lean path in place, and return it.

    Args:
        model: the model with its adapter, on the device where it will be trained.
        placement: `streamed` moves the layers' frozen weights to the host: the model can then only be trained and
            evaluated here, and its adapter saved.
        recompute_attention, tile_tokens, pinned_gib: as in `config.MemorySettings`.
        dtype: dtype of the arithmetic; unset = that of the frozen norms.

    Raises:
        ModelError: the model has no lean path; the message says why.
        HostMemoryError: host memory cannot be had.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    weight = base.base_model.norm.weight
    options = LeanOptions(
        placement=placement,
        recompute_attention=recompute_attention,
        tile_tokens=tile_tokens,
        pinned_bytes=None if pinned_gib is None else int(pinned_gib * 2**30),
        vocabulary_on_host=False,
    )
    lean = LeanNetwork(model, weight.device, dtype or weight.dtype, options)
    decoder, head = base.base_model, base.get_output_embeddings()
    stock_forward = base.forward

    # Trainers read the signatures to see which columns a model takes, and generation validates against them.
    @functools.wraps(decoder.forward)
    def decode(
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        hidden_TD, positions_T, size = _run(lean, input_ids, attention_mask, position_ids, others)
        normed_TD = _FinalNorm.apply(hidden_TD, *lean.final_norm)
        if positions_T is None:
            return BaseModelOutputWithPast(last_hidden_state=normed_TD.view(*size, -1))
        batch_ND = normed_TD.new_zeros(size[0] * size[1], normed_TD.shape[1]).index_copy(0, positions_T, normed_TD)
        return BaseModelOutputWithPast(last_hidden_state=batch_ND.view(*size, -1))

    @functools.wraps(stock_forward)
    def forward(*arguments: Any, labels: Tensor | None = None, **others: Any) -> Any:
        if labels is None:
            return stock_forward(*arguments, **others)
        num_items = others.pop("num_items_in_batch", None)
        names = ("input_ids", "attention_mask", "position_ids")
        given = dict(zip(names, arguments, strict=False)) | {n: others.pop(n) for n in names if n in others}
        loss = _loss(lean, head, given, labels, num_items, others)
        return CausalLMOutputWithPast(loss=loss)

    decoder.forward, base.forward = decode, forward
    return model


def _run(
    lean: LeanNetwork,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    others: dict[str, Any],
) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
    """Return hidden states [T, D] of all real tokens, their places in the batch (None: everywhere), and its size."""
    refused = [name for name in _REFUSED if (value := others.get(name)) is not None and value is not False]
    if input_ids is None or refused:
        raise ModelError(
            f"a lean model takes token ids of whole sequences, not {', '.join(refused) or 'no input_ids'}",
            hint="generate with the saved adapter on a model that was not made lean",
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ModelError(f"a lean model takes masks [batch, tokens], not {attention_mask.ndim} dimensions")
    size = (input_ids.shape[0], input_ids.shape[1])
    paths, depths_T, real = _paths(attention_mask, position_ids, size, input_ids.device)
    positions_T = None if bool(real.all()) else real.flatten().nonzero()[:, 0]
    ids_T = input_ids.flatten() if positions_T is None else input_ids.flatten()[positions_T]
    return lean.hidden_states(ids_T, depths_T, lean.tasks(paths)), positions_T, size


def _paths(
    mask: Tensor | None, position_ids: Tensor | None, size: tuple[int, int], device: torch.device
) -> tuple[tuple[Path, ...], Tensor, Tensor]:
    """Return one path per sequence of a batch, the depth of each real token, and which tokens are real [B, S].

    Position ids that start again within a line are several sequences side by side, as transformers takes them.
    """
    real = torch.ones(size, dtype=torch.bool, device=device) if mask is None else mask.bool()
    if bool((real.int().diff(dim=1).abs().sum(1) > 1).any()):
        raise ModelError("an attention mask with a hole: a lean model takes padding on the left or on the right only")
    starts = torch.zeros_like(real)
    first = real.int().argmax(dim=1)
    starts[torch.arange(size[0], device=device), first] = True
    if position_ids is not None:
        steps = position_ids.expand(size).diff(dim=1) != 1
        starts[:, 1:] |= steps
    starts &= real
    starts_T = starts[real].nonzero()[:, 0].tolist()
    total = int(real.sum())
    bounds = zip(starts_T, [*starts_T[1:], total], strict=True)
    paths = tuple(Path(start, stop) for start, stop in bounds)
    depths_T = torch.cat([torch.arange(path.stop - path.start, device=device) for path in paths])
    return paths, depths_T, real


def _loss(
    lean: LeanNetwork,
    head: Any,
    given: dict[str, Any],
    labels: Tensor,
    num_items: Any,
    others: dict[str, Any],
) -> Tensor:
    """Return transformers' causal loss: next-token cross-entropy, a mean or a sum over `num_items`."""
    inputs = (given.get("input_ids"), given.get("attention_mask"), given.get("position_ids"))
    hidden_TD, positions_T, size = _run(lean, *inputs, others)
    targets = torch.full(size, _IGNORED, dtype=labels.dtype, device=labels.device)
    targets[:, :-1] = labels[:, 1:]
    targets_T = targets.flatten() if positions_T is None else targets.flatten()[positions_T]
    trained_N = (targets_T != _IGNORED).nonzero()[:, 0]
    logp_N = normed_logprobs(
        hidden_TD,
        trained_N,
        targets_T[trained_N],
        Head(head.weight, head.bias, 1.0, None, lean.dtype),
        lean.final_norm,
        chunk_tokens=512,
    )
    if num_items is None:
        return -logp_N.sum() / trained_N.numel()
    return -logp_N.sum() / torch.as_tensor(num_items, device=logp_N.device)


class _FinalNorm(torch.autograd.Function):
    """The final RMS norm; saves its input and nothing else."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.eps = eps
        return rms_norm(x_TD, weight_D, eps, torch.empty_like(x_TD))

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D = ctx.saved_tensors
        d_x_TD = torch.empty_like(x_TD)
        rms_norm_backward_(grad_TD.contiguous(), x_TD, weight_D, ctx.eps, d_x_TD, adds=False)
        return d_x_TD, None, None
