"""Pairs as tokens: lengths worked out by hand, what is trained, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.dataset_stubs import assistant, trajectory, user, write_trajectories
from tests.fixtures_tokenizers import CHATML_TOOLS_OBJECT, GEMMA, tiny_tokenizer
from tests.pair_cases import MULTI_TURN, ONE_A_WORD, TINY, build, load, only, row, trained
from tests.rendering_cases import text_of, trained_parts

from traceforge.config import DataSettings
from traceforge.errors import InputError
from traceforge.samples.dataset import load_samples
from traceforge.samples.pair_build import build_pairs


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "limit", "kept"),
    [(20, 40, 30, 50, (30, 30)), (100, 2000, 40, 2048, (1948, 40)), (20, 40, 30, 60, (40, 30)), (3, 2, 9, 4, (1, 1))],
)
def test_the_prompt_is_kept_whole_and_each_side_is_cut_for_itself(  # C1, C12
    tmp_path: Path, prompt: int, chosen: int, rejected: int, limit: int, kept: tuple[int, int]
) -> None:
    folder = build(tmp_path, row(prompt, chosen, rejected))
    pair = only(load(folder, max_tokens=limit, length_policy="truncate_end"))
    assert trained(pair) == kept
    for (sample,), length in zip((pair.chosen, pair.rejected), kept, strict=True):
        assert sample.num_tokens == prompt + length <= limit
        assert sample.token_ids_S[:prompt].tolist() == list(range(2, 2 + prompt))
        assert sample.weights_S.tolist() == [0] * prompt + [1] * length
    assert pair.cuts == (("cut_at_end",) if kept != (chosen, rejected) else ())


def test_a_pair_whose_prompt_fills_the_limit_is_refused(tmp_path: Path) -> None:
    folder = build(tmp_path, row(50, 10, 10), row(49, 10, 11))
    sets = load(folder, max_tokens=50, length_policy="truncate_end")
    assert trained(only(sets)) == (1, 1)
    refused = sets.statistics.refusals["nothing_trained"]
    assert (refused.count, refused.examples) == (1, ("pairs:1.chosen|pairs:1.rejected",))
    assert refused.detail.startswith("chosen: ")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 30), st.integers(2, 40), st.integers(2, 40), st.integers(2, 60))
def test_a_cut_never_depends_on_the_sibling(
    tmp_path: Path, prompt: int, chosen: int, rejected: int, limit: int
) -> None:
    folder = build(tmp_path, row(prompt, chosen, rejected), row(1, 2, 3))
    sets = load(folder, max_tokens=max(limit, 4), length_policy="truncate_end")
    room = max(limit, 4) - prompt
    first = [pair for pair in sets.train[0].pairs if pair.pair_id.startswith("pairs:1.")]
    if room <= 0:
        assert not first
        assert sets.statistics.refusals["nothing_trained"].count == 1
    else:
        assert trained(first[0]) == (min(chosen, room), min(rejected, room))


@pytest.mark.parametrize("policy", ["refuse", "shorten_observations"])
@pytest.mark.parametrize(("chosen", "rejected", "side"), [(31, 10, "chosen"), (10, 31, "rejected")])
def test_a_pair_with_a_side_over_the_limit_is_refused_and_counted(
    tmp_path: Path, policy: str, chosen: int, rejected: int, side: str
) -> None:
    folder = build(tmp_path, row(20, chosen, rejected), row(20, 30, 30))
    sets = load(folder, max_tokens=50, length_policy=policy)
    assert only(sets).pair_id == "pairs:2.chosen|pairs:2.rejected"
    assert sets.statistics.refusals["too_long"].detail == f"{side}: 51 tokens under {policy}, data.max_tokens is 50"
    assert (sets.statistics.sources[0].available, sets.statistics.sources[0].kept) == (2, 1)


def test_a_reply_token_that_both_sides_share_is_trained_on_both(tmp_path: Path) -> None:
    folder = build(tmp_path, {"prompt": "w2 w3", "chosen": "w10 w11 w12", "rejected": "w10 w11 w13 w14"})
    pair = only(load(folder))
    assert pair.chosen[0].token_ids_S.tolist() == [2, 3, 10, 11, 12, 1]
    assert pair.rejected[0].token_ids_S.tolist() == [2, 3, 10, 11, 13, 14, 1]
    assert pair.chosen[0].weights_S.tolist() == [0, 0, 1, 1, 1, 1]
    assert pair.rejected[0].weights_S.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert pair.num_trained_tokens == 9  # in the tree the two shared ones stand once


@pytest.mark.parametrize(("chosen", "rejected"), [("w10", "w10 w11"), ("w10 w11", "w10"), ("w10", "w11")])
def test_a_reply_that_is_a_prefix_of_the_other_and_one_of_a_single_word_are_pairs(
    tmp_path: Path, chosen: str, rejected: str
) -> None:
    pair = only(load(build(tmp_path, {"prompt": "w2", "chosen": chosen, "rejected": rejected})))
    assert trained(pair) == (len(chosen.split()) + 1, len(rejected.split()) + 1)


def test_sides_that_came_to_the_same_tokens_are_refused(tmp_path: Path) -> None:
    # C7: rendered ids are compared, not the rows; both words are unknown to this tokenizer.
    rows = [{"prompt": "w2", "chosen": "this", "rejected": "that"}, {"prompt": "w2", "chosen": "w9", "rejected": "w8"}]
    sets = load(build(tmp_path, *rows))
    assert sets.statistics.refusals["identical_after_tokenising"].count == 1
    assert only(sets).pair_id == "pairs:2.chosen|pairs:2.rejected"


def test_sides_that_differ_only_behind_the_limit_are_refused_as_identical(tmp_path: Path) -> None:
    rows = [{"prompt": "w2 w3", "chosen": "w9 w10 w11", "rejected": "w9 w10 w12"}, row(2, 3, 4)]
    sets = load(build(tmp_path, *rows), max_tokens=4, length_policy="truncate_end")
    assert sets.statistics.refusals["identical_after_tokenising"].detail.endswith("cut at data.max_tokens = 4")


def test_an_ending_of_several_turns_has_one_sequence_a_turn_and_trains_only_turns(tmp_path: Path) -> None:
    pair = only(load(build(tmp_path, MULTI_TURN), TINY))
    assert [trained_parts(TINY, sample) for sample in pair.chosen] == [["one<|im_end|>"], ["two<|im_end|>"]]
    assert trained_parts(TINY, pair.rejected[0]) == ["stop<|im_end|>"]
    assert [sample.sample_id for sample in pair.samples] == [
        "pairs:1.chosen#0",
        "pairs:1.chosen#1",
        "pairs:1.rejected#0",
    ]
    assert {(sample.group_id, sample.task_id) for sample in pair.samples} == {(pair.group_id, "pairs:1")}


def test_turns_behind_the_limit_are_counted_as_cut_off_and_those_before_stay(tmp_path: Path) -> None:
    folder = build(tmp_path, MULTI_TURN)
    whole = only(load(folder, TINY))
    limit = whole.chosen[1].num_tokens - whole.chosen[1].num_trained_tokens - 1  # up to where the second turn begins
    cut = only(load(folder, TINY, max_tokens=limit, length_policy="truncate_end"))
    assert [sample.sample_id for sample in cut.chosen] == ["pairs:1.chosen#0"]
    assert cut.cuts == ("turns_cut_off",)
    assert cut.rejected[0].token_ids_S.tolist() == whole.rejected[0].token_ids_S.tolist()
    one_more = only(load(folder, TINY, max_tokens=limit + 1, length_policy="truncate_end"))
    assert [sample.num_trained_tokens for sample in one_more.chosen] == [whole.chosen[0].num_trained_tokens, 1]


def test_a_pair_with_one_turn_over_the_limit_is_refused_though_those_before_it_fit(tmp_path: Path) -> None:
    folder = build(tmp_path, MULTI_TURN, {"prompt": "go", "chosen": "one", "rejected": "two"})
    longest = load(folder, TINY).train[0].pairs[0].chosen[1].num_tokens
    sets = load(folder, TINY, max_tokens=longest - 1)
    assert [pair.pair_id for pair in sets.train[0].pairs] == ["pairs:2.chosen|pairs:2.rejected"]
    assert sets.statistics.refusals["too_long"].detail.startswith(f"chosen: {longest} tokens")


def test_a_named_turn_takes_nothing_of_its_run_behind_it(tmp_path: Path) -> None:
    shared = (user("task"), assistant("look"), user("seen"))
    one = trajectory("a", *shared, assistant("fix"), user("done"), assistant("submit"))
    other = trajectory("b", *shared, assistant("give up"), user("?"), assistant("sorry"))
    ingested = write_trajectories(tmp_path / "ingested", one, other)
    build_pairs(ingested, tmp_path / "turns", explicit=["a#1|b#1"])
    pair = only(load(str(tmp_path / "turns"), TINY))
    assert [sample.sample_id for sample in pair.samples] == ["a#1", "b#1"]
    assert "sorry" not in text_of(TINY, pair.rejected[0])
    build_pairs(ingested, tmp_path / "runs", explicit=["a|b"])
    pair = only(load(str(tmp_path / "runs"), TINY))
    assert [sample.sample_id for sample in pair.samples] == ["a#1", "a#2", "b#1", "b#2"]


def test_flagged_and_empty_turns_of_an_ending_are_not_trained(tmp_path: Path) -> None:
    ending = [*MULTI_TURN["chosen"], {"role": "user", "content": "?"}, {"role": "assistant", "content": " "}]
    ending[0] = {**ending[0], "weight": 0}
    pair = only(load(build(tmp_path, {**MULTI_TURN, "chosen": ending}), TINY))
    assert [sample.sample_id for sample in pair.chosen] == ["pairs:1.chosen#1"]


def test_observations_are_shortened_alike_on_both_sides(tmp_path: Path) -> None:
    long = "word " * 300
    tool = [{"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}]
    tool += [{"role": "tool", "tool_call_id": "c", "content": long}]
    rows = {"prompt": [{"role": "user", "content": long}, *tool], "chosen": "yes", "rejected": "no"}
    template = tiny_tokenizer(CHATML_TOOLS_OBJECT)
    folder = build(tmp_path, rows)
    pair = only(load(folder, template, length_policy="shorten_observations", observation_limit_tokens=20))
    texts = [text_of(template, side[0]) for side in (pair.chosen, pair.rejected)]
    assert texts[0].removesuffix("yes<|im_end|>\n") == texts[1].removesuffix("no<|im_end|>\n")
    assert texts[0].count("characters omitted") == 1  # the task itself is never shortened
    assert pair.cuts == ("observations_shortened",)


def test_a_bos_of_the_template_stands_once_at_the_start_of_each_side(tmp_path: Path) -> None:
    # A4: it is neither doubled by the tokenizer nor put in front of a reply.
    tokenizer = tiny_tokenizer(GEMMA)
    pair = only(load(build(tmp_path, {"prompt": "hello", "chosen": "Yes.", "rejected": "No."}), tokenizer))
    for sample in pair.samples:
        assert np.flatnonzero(sample.token_ids_S == tokenizer.bos_token_id).tolist() == [0]
        assert trained_parts(tokenizer, sample)[0].endswith("<end_of_turn>")  # the turn's own terminator is trained


def test_a_preference_prompt_is_byte_for_byte_the_prompt_of_fine_tuning(tmp_path: Path) -> None:
    # A18: the same messages through both paths.
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello there"}]
    pair = only(load(build(tmp_path, {"prompt": history, "chosen": "Yes.", "rejected": "No."}), TINY))
    reply = [{"role": "assistant", "content": "Yes."}]
    (tmp_path / "sft.jsonl").write_text(json.dumps({"prompt": history, "completion": reply}) + "\n")
    given = DataSettings.model_validate({"train": str(tmp_path / "sft.jsonl"), "length_policy": "refuse"})
    (sample,) = load_samples(given, TINY).train[0].samples
    assert pair.chosen[0].token_ids_S.tolist() == sample.token_ids_S.tolist()
    assert pair.chosen[0].weights_S.tolist() == sample.weights_S.tolist()
    border = int(np.flatnonzero(sample.weights_S)[0])
    assert pair.rejected[0].token_ids_S[:border].tolist() == sample.token_ids_S[:border].tolist()


def test_an_action_target_trains_actions_only_and_refuses_a_side_without_one(tmp_path: Path) -> None:
    block = "Look.\n```bash\nls\n```"
    rows = [
        {"prompt": "go", "chosen": block, "rejected": block.replace("ls", "rm")},
        {"prompt": "go", "chosen": block, "rejected": "no"},
    ]
    sets = load(build(tmp_path, *rows), TINY, target="action")
    assert trained_parts(TINY, only(sets).rejected[0]) == ["```bash\nrm\n```<|im_end|>"]
    assert sets.statistics.refusals["no_action"].detail.startswith("rejected: ")


def test_the_transcript_rendering_gives_both_sides_one_prompt(tmp_path: Path) -> None:
    pair = only(load(build(tmp_path, MULTI_TURN), TINY, rendering="transcript"))
    first, other = (text_of(TINY, side[0]) for side in (pair.chosen, pair.rejected))
    assert first.removesuffix("one<|im_end|>\n") == other.removesuffix("stop<|im_end|>\n")
    assert "Case: pairs:1" in first


_TEXT = st.one_of(
    st.text(max_size=12), st.sampled_from(["<|im_end|>", "</s>", "</think>", "{{ x }}", "\n", "Yes. No."])
)
_TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": _TEXT.map("w5 {}".format)}),
    min_size=1,
    max_size=4,
)
_PROMPT = _TEXT.map("w5 {}".format)  # at least one token, whatever the tokenizer
# Each ending begins with a turn that is trained, so that everything before the first trained token is the prompt.
_ENDINGS = st.builds(
    lambda text, behind: [{"role": "assistant", "content": text}, *behind],
    _TEXT.filter(str.strip),
    _TURNS | st.just([]),
)
_ROWS = st.lists(
    st.fixed_dictionaries({"prompt": st.one_of(_PROMPT, _TURNS), "chosen": _ENDINGS, "rejected": _ENDINGS}),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=_ROWS,
    tokenizer=st.sampled_from([TINY, tiny_tokenizer(GEMMA), ONE_A_WORD]),
    policy=st.sampled_from(["refuse", "shorten_observations", "truncate_end"]),
    limit=st.sampled_from([4, 40, 70, 2000]),
)
def test_any_pairs_become_sound_sequences_or_counted_refusals(
    tmp_path: Path, rows: list[Any], tokenizer: Any, policy: str, limit: int
) -> None:
    try:
        folder = build(tmp_path, *rows, {"prompt": "w2", "chosen": "w9", "rejected": "w8"})
        sets = load(folder, tokenizer, length_policy=policy, max_tokens=limit)
    except InputError:
        return
    pairs = sets.train[0].pairs
    refused = sum(each.count for each in sets.statistics.refusals.values())
    assert len(pairs) + refused == sets.statistics.sources[0].available
    for pair in pairs:
        assert min(trained(pair)) >= 1
        assert all(sample.num_tokens <= limit and sample.weights_S[0] == 0 for sample in pair.samples)
        assert all(set(sample.weights_S.tolist()) <= {0.0, 1.0} for sample in pair.samples)
        # No sequence of a side trains a token of the prompt that both sides begin with.
        first = [int(np.flatnonzero(sample.weights_S)[0]) for sample in (pair.chosen[0], pair.rejected[0])]
        border = min(first)
        assert pair.chosen[0].token_ids_S[:border].tolist() == pair.rejected[0].token_ids_S[:border].tolist()
