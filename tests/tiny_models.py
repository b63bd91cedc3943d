"""Small random models and samples for tests, and the plain-torch reference that the product is measured against.

The reference knows nothing of rows, chunks or our attention: one sample at a time through the model's own forward with
eager attention, full logits, log_softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from traceforge.config import AdapterSettings
from traceforge.models.adapters import add_adapter
from traceforge.models.language_model import LanguageModel, choose_layout
from traceforge.samples.tokens import Sample


def tiny_network(family: str = "llama", *, vocabulary: int = 211, layers: int = 2, **changes: Any) -> nn.Module:
    """Return a random float32 `llama`, `qwen3`, `qwen2` or `mistral` with grouped heads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        **({"sliding_window": None} if family == "mistral" else {}),
        **changes,
    }
    torch.manual_seed(7)
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options), attn_implementation="eager")
    for parameter in network.parameters():  # livelier than the library's 0.02: attention must matter
        if parameter.ndim == 2:
            parameter.data.normal_(0, 0.15)
    return network.float().eval()


def tiny_language_model(
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "tree",
    adapter: bool = True,
    dropout: float = 0.0,
    logits_chunk_tokens: int = 7,
    **changes: Any,
) -> LanguageModel:
    """Return a tiny model as training sees it; a LoRA adapter has random B, so that A has a gradient too."""
    network = tiny_network(family, **changes)
    network.requires_grad_(not adapter)
    if adapter:
        network = add_adapter(network, AdapterSettings(rank=4, alpha=8, dropout=dropout), seed=3)
        randomize_adapter(network)
    network = network.to(dtype)
    if dtype == torch.float64:
        _norms_in_float64(network)
    model = LanguageModel(network, torch.device("cpu"), dtype, logits_chunk_tokens=logits_chunk_tokens)
    choose_layout(model, attention)
    return model


def _norms_in_float64(network: nn.Module) -> None:
    """Undo transformers' float32 inside RMSNorm: its rounding would hide what float64 is to prove."""
    for module in network.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def forward(hidden: Tensor, norm: Any = module) -> Tensor:
                scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
                return norm.weight * (hidden * scale)

            module.forward = forward  # type: ignore[method-assign]


def randomize_adapter(network: nn.Module, *, scale: float = 0.05) -> None:
    """Fill every LoRA B with small random numbers."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def random_samples(
    lengths: Sequence[int], *, vocabulary: int = 211, seed: int = 0, trained_share: float = 0.4, weighted: bool = False
) -> list[Sample]:
    """Return samples of these lengths whose last tokens are trained; `weighted` gives weights other than 1."""
    generator = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        weights = np.zeros(length)
        first = max(1, round(length * (1 - trained_share)))
        weights[first:] = generator.choice([0.5, 1.0, 2.0], length - first) if weighted else 1.0
        name = f"random{seed}#{number}"
        samples.append(Sample(name, name, name, generator.integers(0, vocabulary, length), weights))
    return samples


def reference_loss(network: nn.Module, samples: Sequence[Sample]) -> Tensor:
    """Return -sum(w * logp) / sum(w) over the samples, each run alone in plain torch."""
    total: Tensor | float = 0.0
    weight = 0.0
    for sample in samples:
        ids = torch.as_tensor(sample.token_ids_S)[None]
        length = ids.shape[1]
        dtype = next(network.parameters()).dtype
        hidden_mask = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
        logits = network(input_ids=ids, attention_mask=hidden_mask, use_cache=False).logits[0]
        logp = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        weights = torch.as_tensor(sample.weights_S[1:], dtype=logp.dtype)
        total = total - (weights * logp).sum()
        weight += float(weights.sum())
    assert isinstance(total, Tensor)
    return total / weight


def gradients(network: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every gradient by parameter name."""
    return {name: p.grad.detach().clone() for name, p in network.named_parameters() if p.grad is not None}


def reference_gradients(
    model: LanguageModel, samples: Sequence[Sample], *, attention: str = "eager"
) -> tuple[float, dict[str, Tensor]]:
    """Return the reference loss and gradients on the same weights; leaves no gradient behind.

    transformers' eager attention takes its softmax in float32; `sdpa` (with the same dense mask) stays in float64.
    """
    name = model.base.config._attn_implementation
    model.base.set_attn_implementation(attention)
    try:
        model.model.zero_grad(set_to_none=True)
        loss = reference_loss(model.model, samples)
        loss.backward()
        found = gradients(model.model)
    finally:
        model.model.zero_grad(set_to_none=True)
        model.base.set_attn_implementation(name)
    return float(loss.detach()), found
