"""Small models of every family for the lean path on a GPU, their float32 reference, and stock transformers beside them.

All three hold the same numbers: weights are rounded to bfloat16 (and to NF4 where asked) before anything is compared.
The reference and the stock model run one sample at a time through transformers' own forward with full logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests.tiny_models import gradients, randomize_adapter, tiny_network
from torch import Tensor, nn

from traceforge.config import AdapterSettings
from traceforge.models.adapters import add_adapter
from traceforge.models.language_model import LanguageModel, choose_layout
from traceforge.models.lean import LeanNetwork, LeanOptions
from traceforge.samples.tokens import Sample

VOCABULARY = 1000


def network_of(family: str, dtype: torch.dtype, *, nf4: bool, device: str = "cuda") -> nn.Module:
    """Return a model with a LoRA adapter whose B is random; `nf4` in float32 holds the same values, written out."""
    network = tiny_network(
        family, vocabulary=VOCABULARY, layers=3, hidden_size=256, intermediate_size=640, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        if parameter.ndim == 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
        parameter.data = parameter.data.bfloat16().to(dtype)
    network = network.to(device)
    if nf4:
        _quantize(network, dtype, device)
    network.requires_grad_(False)
    network = add_adapter(network, AdapterSettings(rank=16, alpha=16), seed=3)
    randomize_adapter(network)
    return network.to(device)


def _quantize(network: nn.Module, dtype: torch.dtype, device: str) -> None:
    """Replace every linear of the layers by its NF4 version, or (float32) by the values of that."""
    import bitsandbytes

    for layer in network.base_model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if type(linear) is not nn.Linear:
                    continue
                weight = linear.weight.data.to(torch.bfloat16)
                found = bitsandbytes.nn.Params4bit(
                    weight.cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4"
                ).to(device)
                if dtype == torch.float32:
                    values = bitsandbytes.functional.dequantize_4bit(found.data, found.quant_state)
                    linear.weight.data = values.float()
                    continue
                packed = bitsandbytes.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=dtype,
                    quant_type="nf4", device="meta",
                )  # fmt: skip
                packed.weight, packed.bias = found, linear.bias
                packed.support_avx512bf16_for_cpu = False
                setattr(part, name, packed)


def stock_update(network: nn.Module, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities of the trained tokens, sample by sample, and the gradients of their mean loss."""
    device = next(network.parameters()).device
    network.zero_grad(set_to_none=True)
    weight = sum(sample.total_weight for sample in samples)
    found = []
    for sample in samples:
        ids = torch.as_tensor(sample.token_ids_S, device=device)
        logits = network(input_ids=ids[None], use_cache=False).logits[0]
        logp = logits.float().log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        weights = torch.as_tensor(sample.weights_S[1:], device=device).float()
        (-(weights * logp).sum() / weight).backward()
        found.append(logp.detach()[weights > 0])
    grads = gradients(network)
    network.zero_grad(set_to_none=True)
    return torch.cat(found), grads


def generic_model(network: nn.Module, dtype: torch.dtype, device: str = "cuda") -> LanguageModel:
    """Return a model on the generic path; its layout is a tree."""
    model = LanguageModel(network, torch.device(device), dtype, logits_chunk_tokens=300)
    choose_layout(model, "tree")
    return model


def lean_model(network: nn.Module, dtype: torch.dtype, options: LeanOptions, device: str = "cuda") -> LanguageModel:
    """Return a model on the lean path; its layout is a tree."""
    model = generic_model(network, dtype, device)
    model.lean = LeanNetwork(network, model.device, dtype, options)
    return model


def lean_update(model: LanguageModel, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same as `stock_update`, from one row."""
    model.model.zero_grad(set_to_none=True)
    (row,) = model.rows(tuple(samples), tokens_per_row=10**6)
    logp_N, weights_N = model.row_logprobs(row)
    (-(weights_N * logp_N).sum() / sum(sample.total_weight for sample in samples)).backward()
    by_position = dict(zip(row.targets_N().tolist(), logp_N.detach(), strict=True))
    found = []
    for sample in samples:
        positions = row.sample_positions_S(row.sample_ids.index(sample.sample_id))
        found += [by_position[int(p)] for p, w in zip(positions, sample.weights_S, strict=True) if w > 0]
    grads = gradients(model.model)
    model.model.zero_grad(set_to_none=True)
    return torch.stack(found), grads


def errors(
    found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]
) -> tuple[float, float, dict[str, float]]:
    """Return the RMS error of log-probabilities, the relative error of all gradients together, and of each."""
    logp = float((found[0].double() - wanted[0].double()).pow(2).mean().sqrt())
    assert found[1].keys() == wanted[1].keys()
    pairs = {name: (found[1][name].double(), grad.double()) for name, grad in wanted[1].items()}
    norm = sum(float(grad.norm()) ** 2 for _, grad in pairs.values()) ** 0.5
    together = sum(float((one - grad).norm()) ** 2 for one, grad in pairs.values()) ** 0.5 / norm
    return logp, together, {name: float((one - grad).norm() / grad.norm()) for name, (one, grad) in pairs.items()}
