"""Named model shapes with random weights, written as the checkpoints that every contender loads; and rows to train on.

Time and memory do not depend on the weights' values, so nothing is downloaded. The NF4 checkpoint has the layout that
transformers and bitsandbytes save (pre-quantised, double quantisation), with embedding, norms and head in bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from traceforge.samples.branches import Pair
from traceforge.samples.tokens import Sample

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}


def config_of(shape: str) -> Any:
    """Return the Qwen3 configuration of a shape."""
    from transformers import AutoConfig

    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    return AutoConfig.for_model("qwen3", **SHAPES[shape], rms_norm_eps=1e-6, rope_parameters=rope, dtype="bfloat16")


def write_checkpoint(shape: str, quantization: str, folder: Path, device: str) -> None:
    """Write random weights of a shape as safetensors, made tensor by tensor: `quantization` is none or nf4."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True)
    config = config_of(shape)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    num_shards, held = 0, 0

    def flush() -> None:
        nonlocal num_shards, held
        name = f"model-{num_shards:05d}.safetensors"
        save_file({key: value.contiguous().cpu() for key, value in shard.items()}, str(folder / name), {"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()
        num_shards, held = num_shards + 1, 0

    for name, parameter in network.named_parameters():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = torch.randn(parameter.shape, device=device, generator=generator) * 0.02
        values = (values + 1 if "norm" in name else values).to(torch.bfloat16)
        is_linear = name.split(".")[-2] in LINEARS
        found = _nf4(name, values) if is_linear and quantization == "nf4" else {name: values}
        shard.update(found)
        held += sum(each.numel() * each.element_size() for each in found.values())
        if held > 2 * 2**30:
            flush()
    flush()
    total = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(total))
    written = config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    if quantization == "nf4":
        written["quantization_config"] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
        }
    (folder / "config.json").write_text(json.dumps(written, indent=1))
    _write_tokenizer(folder)


def _nf4(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that bitsandbytes saves for a 4-bit weight."""
    import bitsandbytes.functional as bnb

    packed, state = bnb.quantize_4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4")
    return {name: packed} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}


def _write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer with ChatML: some trainers insist on one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {piece: i for i, piece in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *specials])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)


def sft_sample(tokens: int, vocabulary: int, seed: int = 0) -> Sample:
    """Return one sample of random tokens, all of them trained."""
    weights = np.ones(tokens)
    weights[0] = 0.0
    return Sample(f"s#{seed}", "s", "s", np.random.default_rng(seed).integers(0, vocabulary, tokens), weights)


def preference_pair(prompt: int, reply: int, vocabulary: int, seed: int = 0) -> Pair:
    """Return one pair of random tokens: two replies to one prompt."""
    generator = np.random.default_rng(seed)
    history = generator.integers(0, vocabulary, prompt)
    sides = []
    for side in ("chosen", "rejected"):
        ids = np.concatenate([history, generator.integers(0, vocabulary, reply)])
        weights = np.zeros(len(ids))
        weights[prompt:] = 1.0
        sides.append(Sample(side, "p", "p", ids, weights))
    return Pair("chosen|rejected", "p", "p", (sides[0],), (sides[1],))


def trajectory(turns: int, total: int, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Return the turns of one trajectory of about `total` tokens, each a sample that continues the one before.

    Lengths follow a real mini-swe-agent run: turns of about 45 tokens of text and 130 of reasoning, and observations
    of exponentially distributed length.
    """
    generator = np.random.default_rng(seed)
    history = generator.integers(0, vocabulary, 1600)
    scale = (total - 1600 - turns * 180) / turns
    samples = []
    for turn in range(turns):
        reply = generator.integers(0, vocabulary, int(generator.integers(85, 270)))
        ids = np.concatenate([history, reply])
        weights = np.zeros(len(ids))
        weights[len(history) :] = 1.0
        samples.append(Sample(f"t#{turn}", "t", "t", ids, weights))
        observation = generator.integers(0, vocabulary, max(20, int(generator.exponential(scale))))
        history = np.concatenate([ids, observation])
    return samples
