"""Real turns of real agent runs: any packing, sharing and cut into micro-batches gives the update of plain samples.

Samples  Turns of mini-swe-agent logs, ingested, built and rendered under the real Qwen3 tokenizer, observations
         shortened. The renderings differ in what neighbouring turns share:
         - the Qwen3 template drops the reasoning of old turns, so a turn forks from those after it;
         - it writes an empty think block where a turn without reasoning is generated and none once that is history;
         - it keeps reasoning while tools answer, so each turn continues the one before it;
         - the transcript ends every prompt with the same line, so each turn forks from the history.
Models   Tiny random Llama and Qwen3 with the tokenizer's whole vocabulary (151,669) and random LoRA B; in float64 with
         token ids renumbered to those that occur.
Against  Each sample alone: eager attention under a dense mask, log_softmax over the whole vocabulary in float64.
Within   float32: 1e-6 of the loss, 1e-4 relative L2 of every adapter gradient; float64: 1e-10 of both. Only the order
         of summation differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.real_trajectories import load_turns, plain_loss, renumbered
from tests.tiny_models import gradients, tiny_language_model
from torch import Tensor

from traceforge.models.language_model import LanguageModel, choose_layout
from traceforge.oracles.record import relative_l2
from traceforge.samples.prefix_tree import common_prefix_length
from traceforge.samples.tokens import Sample
from traceforge.training.evaluation import evaluate
from traceforge.training.update import backward, plan_update

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 151_669
SMALL_VOCABULARY = 1000
FAMILIES = ("llama", "qwen3")
GRADIENT_RELATIVE_L2 = 1e-4
LOSS_RELATIVE = 1e-6
ROUNDING_OF_FLOAT64 = 1e-10


@dataclass(frozen=True)
class Case:
    """Some turns of one log.

    Args:
        max_tokens: the turns that are longer are refused, so this chooses the first ones.
        lengths: tokens of each sample.
        forks: of the tree of them all.
        num_rows: rows by layout and `tokens_per_row`.
    """

    log: str
    rendering: str
    max_tokens: int
    lengths: tuple[int, ...]
    forks: int
    num_rows: dict[tuple[str, int], int]


CASES = {
    "chat, old reasoning dropped": Case(
        "mini-swe-agent-v1/astropy__astropy-12907.traj.json",
        "chat",
        2200,
        (1641, 2090, 2140),
        2,
        {("packed", 4200): 2, ("tree", 2200): 2, ("tree", 8000): 1},
    ),
    "chat, empty think blocks dropped": Case(
        "mini-swe-agent-v1/github_issue.traj.json",
        "chat",
        1300,
        (786, 874, 989, 1112, 1283),
        4,
        {("plain", 1300): 5, ("packed", 1300): 5, ("packed", 2700): 2, ("tree", 1300): 2, ("tree", 8000): 1},
    ),
    "chat, nothing dropped": Case(
        "mini-swe-agent-v2/derived__scikit-learn__scikit-learn-14141.traj.json",
        "chat",
        2300,
        (1491, 1961),
        0,
        {("packed", 4000): 1, ("tree", 2300): 1},
    ),
    "transcript": Case(
        "mini-swe-agent-v1/github_issue.traj.json",
        "transcript",
        1300,
        (814, 905, 1023, 1149),
        3,
        {("plain", 1300): 4, ("packed", 2700): 2, ("tree", 1150): 2, ("tree", 8000): 1},
    ),
}
RUNS = [(name, layout, size) for name, case in CASES.items() for layout, size in case.num_rows]
FORKED = [name for name, case in CASES.items() if case.forks]


@dataclass(frozen=True)
class Reference:
    """A model and the update that the plain samples of a case give on it."""

    model: LanguageModel
    loss: float
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def turns(qwen3_tokenizer, tmp_path_factory) -> Callable[[str], tuple[Sample, ...]]:
    @cache
    def load(name: str) -> tuple[Sample, ...]:
        case = CASES[name]
        return load_turns(
            case.log,
            qwen3_tokenizer,
            tmp_path_factory.mktemp("run"),
            rendering=case.rendering,
            max_tokens=case.max_tokens,
            observation_limit_tokens=64,
        )

    return load


@pytest.fixture(scope="module")
def reference(turns) -> Callable[..., Reference]:
    @cache
    def model(family: str, dtype: torch.dtype) -> LanguageModel:
        size = VOCABULARY if dtype == torch.float32 else SMALL_VOCABULARY
        return tiny_language_model(family, dtype=dtype, vocabulary=size, attention="plain", logits_chunk_tokens=50)

    @cache
    def measure(family: str, name: str, dtype: torch.dtype = torch.float32) -> Reference:
        used = model(family, dtype)
        samples = turns(name) if dtype == torch.float32 else renumbered(turns(name))
        own = used.base.config._attn_implementation
        # transformers' eager attention takes its softmax in float32; SDPA under the same mask stays in float64
        used.base.set_attn_implementation("eager" if dtype == torch.float32 else "sdpa")
        loss = plain_loss(used.model, samples)
        loss.backward()
        found = gradients(used.model)
        used.model.zero_grad(set_to_none=True)
        used.base.set_attn_implementation(own)
        return Reference(used, float(loss.detach()), found)

    return measure


@pytest.mark.parametrize("name", CASES)
def test_the_samples_are_what_this_file_says(turns, name):
    samples, case = turns(name), CASES[name]
    assert tuple(sample.num_tokens for sample in samples) == case.lengths
    model = tiny_language_model("llama", vocabulary=VOCABULARY, layers=1)
    (row,) = model.rows(samples, tokens_per_row=8000)
    assert row.num_forks == case.forks


def test_where_a_template_drops_something_the_turns_fork_there(turns, qwen3_tokenizer):
    for name, start in (
        ("chat, old reasoning dropped", "<think>\n**Exploring"),
        ("chat, empty think blocks dropped", "<think>\n\n</think>\n\n"),
    ):
        samples = turns(name)
        assert any("observations_shortened" in sample.cuts for sample in samples)
        assert qwen3_tokenizer.decode(samples[0].token_ids_S[samples[0].weights_S > 0]).startswith(start)
        for sample, later in pairwise(samples):
            fork = common_prefix_length(sample.token_ids_S, later.token_ids_S)
            assert fork == np.flatnonzero(sample.weights_S)[0], "the later one has no think block here"


def test_where_nothing_is_dropped_a_turn_continues_the_one_before(turns, qwen3_tokenizer):
    samples = turns("chat, nothing dropped")
    for sample, later in pairwise(samples):
        assert common_prefix_length(sample.token_ids_S, later.token_ids_S) == sample.num_tokens
    history = qwen3_tokenizer.decode(samples[1].token_ids_S[samples[1].weights_S == 0])
    assert "<think>\nOkay, let's tackle this PR" in history


@pytest.mark.parametrize(("name", "layout", "tokens_per_row"), RUNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_and_split_gives_the_update_of_plain_samples(
    reference, turns, family, name, layout, tokens_per_row
):
    wanted, samples = reference(family, name), turns(name)
    if wanted.model.layout != layout:  # the self-test takes longer than the update
        choose_layout(wanted.model, layout)
    num_rows, row_tokens = assert_same_update(wanted, samples, tokens_per_row)
    assert num_rows == CASES[name].num_rows[layout, tokens_per_row]
    sample_tokens = sum(CASES[name].lengths)
    assert (row_tokens < 0.75 * sample_tokens) == (layout == "tree"), "shared prefixes are computed once, in trees only"


@pytest.mark.parametrize(("name", "tokens_per_row"), [(each, size) for each, layout, size in RUNS if layout == "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_trees_and_plain_samples_agree_to_rounding(reference, turns, family, name, tokens_per_row):
    wanted = reference(family, name, torch.float64)
    if wanted.model.layout != "tree":
        choose_layout(wanted.model, "tree")
    samples = renumbered(turns(name))
    assert_same_update(wanted, samples, tokens_per_row, loss=ROUNDING_OF_FLOAT64, gradient=ROUNDING_OF_FLOAT64)


def assert_same_update(
    wanted: Reference,
    samples: tuple[Sample, ...],
    tokens_per_row: int,
    *,
    loss: float = LOSS_RELATIVE,
    gradient: float = GRADIENT_RELATIVE_L2,
) -> tuple[int, int]:
    """Compare the update of `samples` with the reference; return how many rows and row tokens it took."""
    model = wanted.model
    update = plan_update(model, samples, tokens_per_row=tokens_per_row)
    found_loss = backward(model, update)
    found = gradients(model.model)
    model.model.zero_grad(set_to_none=True)
    assert abs(found_loss - wanted.loss) <= loss * wanted.loss
    assert found.keys() == wanted.gradients.keys()
    assert len(found) == 28
    assert all(each.norm() > 0 for each in wanted.gradients.values())
    differences = {name: relative_l2(found[name], each) for name, each in wanted.gradients.items()}
    assert max(differences.values()) <= gradient, differences
    return len(update.rows), sum(row.num_tokens for row in update.rows)


@pytest.mark.parametrize("name", FORKED)
def test_one_wrong_token_far_back_would_be_noticed(reference, turns, name):
    """The oracle's sharpness: one context token of one sample, 400 tokens before its turn."""
    wanted, samples = reference("llama", name), turns(name)
    ids_S = samples[1].token_ids_S.copy()
    place = int(np.flatnonzero(samples[1].weights_S)[0]) - 400
    ids_S[place] = ids_S[place + 1] if ids_S[place] != ids_S[place + 1] else ids_S[place + 2]
    changed = [samples[0], replace(samples[1], token_ids_S=ids_S), *samples[2:]]
    found = evaluate(wanted.model, changed, tokens_per_row=4200)
    assert abs(found.loss - wanted.loss) > 10 * LOSS_RELATIVE * wanted.loss
