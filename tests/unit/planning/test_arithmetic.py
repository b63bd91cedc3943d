"""The planner's arithmetic against numbers worked out by hand from published configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceforge.config import LINEAR_MODULES
from traceforge.planning.model_config import find_shape
from traceforge.planning.setup import nf4_bytes
from traceforge.planning.textbook import textbook

CONFIGS = Path(__file__).parents[2] / "data" / "model_configs"
GIB, TIB = 2**30, 2**40


def shape(name: str):
    return find_shape("not used", given=CONFIGS / f"{name}.json")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Embedding and output layer 2 x 151,936 x 4,096; a layer 4,096 x (2 x 4,096 + 2 x 1,024 + 3 x 12,288)
        # + norms 2 x 4,096 + 2 x 128; final norm 4,096.
        ("qwen3-8b", 2 * 151936 * 4096 + 36 * (4096 * 47104 + 8448) + 4096),
        # One table (tied), heads of 128 on a hidden size of 1,024, and their norms.
        ("qwen3-0.6b", 151936 * 1024 + 28 * (1024 * (2 * 2048 + 2 * 1024 + 3 * 3072) + 2 * 1024 + 2 * 128) + 1024),
        # One table, biases on q (896), k and v (128 each).
        ("qwen2.5-0.5b", 151936 * 896 + 24 * (896 * (2 * 896 + 2 * 128 + 3 * 4864) + 1152 + 2 * 896) + 896),
        ("llama-3.1-8b", 2 * 128256 * 4096 + 32 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096) + 4096),
        ("mistral-7b-v0.1", 2 * 32000 * 4096 + 32 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096) + 4096),
    ],
)
def test_every_weight_of_a_model_is_counted(name, parameters):
    assert shape(name).parameters() == parameters


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-0.6b", 596_049_920),
        ("qwen2.5-0.5b", 494_032_768),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b-v0.1", 7_241_732_096),
    ],
)
def test_the_counts_are_the_ones_that_the_models_pages_give(name, published):
    assert shape(name).parameters() == published


@pytest.mark.parametrize(("name", "keys"), [("qwen3-8b", 1024), ("llama-3.1-8b", 1024), ("qwen2.5-0.5b", 128)])
def test_grouped_heads_make_keys_narrower_than_queries(name, keys):
    assert shape(name).keys == keys
    assert shape(name).queries > keys


def test_a_lora_adapter_of_rank_16_on_the_seven_linears_of_qwen3_8b_has_43_6_million_weights():
    # Of a layer: r x (in + out) of q, o (4,096 + 4,096), k, v (4,096 + 1,024), gate, up, down (4,096 + 12,288).
    by_hand = 36 * 16 * (2 * 8192 + 2 * 5120 + 3 * 16384)
    assert shape("qwen3-8b").adapter_parameters(16, LINEAR_MODULES) == by_hand == 43_646_976
    assert shape("qwen3-8b").adapter_parameters(16, ("q_proj", "v_proj")) == 36 * 16 * (8192 + 5120)


def test_nf4_holds_half_a_byte_a_weight_a_byte_a_block_of_64_and_four_a_block_of_256_of_those():
    assert nf4_bytes(64 * 256) == 64 * 256 // 2 + 256 + 4
    weights = shape("qwen3-8b").linear_parameters()
    assert weights == 36 * 4096 * 47104
    assert nf4_bytes(weights) == 3_472_883_712 + 108_527_616 + 1_695_744


def test_the_textbook_accounting_of_qwen3_8b_at_32768_tokens():
    book = textbook(shape("qwen3-8b"), 32768)
    assert book.weights / 1e9 == pytest.approx(16.4, abs=0.05)
    assert book.gradients == book.weights
    assert book.optimizer / 1e9 == pytest.approx(98.3, abs=0.05)
    assert book.logits / GIB == pytest.approx(9.2734, abs=5e-5)
    assert book.logits_wide / GIB == pytest.approx(18.5469, abs=5e-5)
    assert book.logits_unfused / GIB == pytest.approx(74.19, abs=5e-3)
    assert book.scores_per_head == 2 * GIB
    assert book.scores == 2.25 * TIB
    assert book.layer_inputs == 9 * GIB
    assert book.total == sum(
        (book.weights, book.gradients, book.optimizer, book.scores, book.layer_inputs, book.logits_unfused)
    )
