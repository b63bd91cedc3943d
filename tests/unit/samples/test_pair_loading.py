"""Pairs as tokens: lengths worked out by hand, what is trained, refusals, split, groups, statistics and the cache."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.dataset_stubs import assistant, trajectory, user, write_trajectories
from tests.fixtures_tokenizers import CHATML, CHATML_TOOLS_OBJECT, DEFAULT_SYSTEM, GEMMA, tiny_tokenizer, word_tokenizer
from tests.rendering_cases import text_of, trained_parts

from traceforge.config import DataSettings
from traceforge.errors import ConfigError, InputError, TemplateError
from traceforge.samples import pair_loading
from traceforge.samples.branches import Pair
from traceforge.samples.dataset import load_samples
from traceforge.samples.pair_build import build_pairs
from traceforge.samples.pair_loading import PairSets, load_pairs

# One token a word, and one for the end of a turn: lengths can be counted by hand.
WORDS = ["<unk>", "</s>", *(f"w{number}" for number in range(2, 6000))]
ONE_A_WORD = word_tokenizer(
    "{% for m in messages %}{{ m.content + (' </s>' if m.role == 'assistant' else ' ') }}{% endfor %}", WORDS
)
TINY = tiny_tokenizer(CHATML)


def words(first: int, count: int) -> str:
    return " ".join(f"w{first + number}" for number in range(count))


def row(prompt: int, chosen: int, rejected: int) -> dict[str, str]:
    """Return a row of so many tokens a part; the end of a turn counts as one of the reply."""
    return {"prompt": words(2, prompt), "chosen": words(1000, chosen - 1), "rejected": words(3000, rejected - 1)}


def build(tmp_path: Path, *rows: Any, name: str = "pairs") -> str:
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    build_pairs(tmp_path / f"{name}.jsonl", tmp_path / name)
    return str(tmp_path / name)


def load(folder: str, tokenizer: Any = ONE_A_WORD, **given: Any) -> PairSets:
    fields = {"train": folder, "max_tokens": 10_000, "length_policy": "refuse", **given}
    return load_pairs(DataSettings.model_validate(fields), tokenizer)


def only(sets: PairSets) -> Pair:
    (pair,) = sets.train[0].pairs
    return pair


def trained(pair: Pair) -> tuple[int, int]:
    return sum(one.num_trained_tokens for one in pair.chosen), sum(one.num_trained_tokens for one in pair.rejected)


def two_pairs(count: int = 2) -> list[dict[str, str]]:
    return [{"prompt": f"w{number + 2}", "chosen": "w500 w501", "rejected": "w600"} for number in range(count)]


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


MULTI_TURN = {
    "prompt": [{"role": "user", "content": "go"}],
    "chosen": [
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "seen"},
        {"role": "assistant", "content": "two"},
    ],
    "rejected": [{"role": "assistant", "content": "stop"}],
}


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


def test_the_split_is_by_task_and_never_parts_pairs_of_one_prompt(tmp_path: Path) -> None:
    rows = [{**each, "rejected": other} for each in two_pairs(4) for other in ("w700", "w701", "w702")]
    sets = load(build(tmp_path, *rows), evaluation_fraction=0.5)
    trained_prompts = {int(pair.chosen[0].token_ids_S[0]) for pair in sets.train[0].pairs}
    held_prompts = {int(pair.chosen[0].token_ids_S[0]) for pair in sets.evaluation}
    assert trained_prompts | held_prompts == {2, 3, 4, 5}
    assert not trained_prompts & held_prompts
    assert len(sets.evaluation) == len(sets.train[0].pairs) == 6
    assert sets.statistics.evaluation is not None
    expected = hashlib.sha256("\n".join(pair.pair_id for pair in sets.evaluation).encode()).hexdigest()
    assert sets.statistics.evaluation_ids_hash == sets.statistics.evaluation.ids_hash == expected


def test_a_second_folder_is_held_out_whole_and_a_shared_task_is_an_error(tmp_path: Path) -> None:
    train, held = build(tmp_path, *two_pairs(), name="train"), build(tmp_path, *two_pairs(3), name="held")
    sets = load(train, evaluation=held)
    assert (len(sets.train[0].pairs), len(sets.evaluation)) == (2, 3)
    with pytest.raises(InputError, match=r"2 pairs \(first: train:1.chosen\|train:1.rejected\) and 2 tasks"):
        load(train, evaluation=train)


def test_one_id_for_two_different_pairs_is_an_error(tmp_path: Path) -> None:
    one = build(tmp_path, {**row(2, 2, 3), "id": "p", "task_id": "x"}, name="one")
    other = build(tmp_path, {**row(2, 3, 2), "id": "p", "task_id": "y"}, name="other")
    with pytest.raises(InputError, match=r"pair id 'p.chosen\|p.rejected' names two different pairs"):
        load(one, evaluation=other)


def test_sources_have_weights_and_one_given_twice_is_one(tmp_path: Path) -> None:
    folder = build(tmp_path, *two_pairs())
    sets = load(folder, train=[{"path": folder, "weight": 0.5}, {"path": folder, "weight": 2}])
    assert [(source.weight, len(source.pairs)) for source in sets.train] == [(0.5, 2), (2.0, 2)]
    assert sets.train[0].samples == sets.train[0].pairs
    assert sets.statistics.dataset_id == folder


def test_groups_are_those_of_the_build_or_each_pair(tmp_path: Path) -> None:
    folder = build(tmp_path, *({**each, "group": "run"} for each in two_pairs()))
    assert [pair.group_id for pair in load(folder).train[0].pairs] == ["run", "run"]
    alone = load(folder, group="none").train[0].pairs
    assert [pair.group_id for pair in alone] == [pair.pair_id for pair in alone]


def test_the_numbers_of_a_set_are_those_counted_by_hand(tmp_path: Path) -> None:
    # Pair 1: prompt 4, replies 3 and 5. Pair 2: the same prompt and first word, replies 4 and 2.
    rows = [
        {"prompt": "w2 w3 w4 w5", "chosen": "w10 w11", "rejected": "w20 w21 w22 w23", "group": "g"},
        {"prompt": "w2 w3 w4 w5", "chosen": "w10 w12 w13", "rejected": "w10", "group": "g"},
    ]
    statistics = load(build(tmp_path, *rows)).statistics
    found, pairs = statistics.train, statistics.train.pairs
    assert pairs is not None
    assert (found.samples, found.tasks, found.trajectories) == (2, 1, 1)
    assert (pairs.pairs, pairs.sequences, pairs.sequence_tokens) == (2, 4, 7 + 9 + 8 + 6)
    assert pairs.tree_tokens == (4 + 3 + 5) + (4 + 1 + 3 + 1)
    assert (pairs.shared_prefix_tokens.min, pairs.shared_prefix_tokens.max, pairs.shared_prefix_tokens.total) == (
        4,
        5,
        9,
    )
    assert (pairs.chosen_tokens.total, pairs.chosen_tokens.median, pairs.rejected_tokens.total) == (7, 3.5, 7)
    assert (pairs.longer_chosen, pairs.longer_rejected, pairs.multi_turn) == (1, 1, 0)
    assert (found.trained_tokens, found.total_weight) == (14, 14.0)
    # In one tree for the group: prompt 4, w10 once, then w11 </s>, w12 w13 </s>, </s>, and the five of w20.
    assert statistics.train_trees.tree_tokens == 4 + 1 + 2 + 3 + 1 + 5
    assert statistics.train_trees.sample_tokens == 30
    assert statistics.sources[0].kind == "pairs"


def test_evaluation_pairs_that_are_trained_too_are_counted(tmp_path: Path) -> None:
    train = build(tmp_path, {**row(2, 2, 3), "task_id": "x"}, name="train")
    held = build(tmp_path, {**row(2, 2, 3), "task_id": "y"}, {**row(2, 2, 4), "task_id": "y"}, name="held")
    evaluation = load(train, evaluation=held).statistics.evaluation
    assert evaluation is not None
    assert evaluation.identical_in_train == 1


def test_a_system_prompt_of_the_template_is_reported(tmp_path: Path) -> None:
    folder = build(tmp_path, {"prompt": "hello", "chosen": "Yes.", "rejected": "No."})
    statistics = load(folder, tiny_tokenizer(DEFAULT_SYSTEM)).statistics
    assert statistics.default_system_prompt == "You are Tiny, a helpful assistant."
    assert statistics.samples_with_default_system_prompt == 1
    assert load(folder, TINY).statistics.default_system_prompt is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"loss_on": "all"}, 'data.loss_on = "all"'),
        ({"length_policy": "drop_oldest"}, 'data.length_policy = "drop_oldest"'),
        ({"train_rows": 1}, "data.train_rows is for row files"),
        ({"revision": "main", "evaluation_rows": 1}, "data.evaluation_rows and data.revision are for row files"),
    ],
)
def test_settings_that_pairs_cannot_honour_are_named(tmp_path: Path, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(build(tmp_path, *two_pairs()), **setting)
    assert message in str(error.value)
    assert "way out" in str(error.value)


def test_what_is_no_folder_of_pairs_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load(str(tmp_path / "missing"))
    build(tmp_path, *two_pairs())
    with pytest.raises(InputError, match="traceforge build pairs"):
        load(str(tmp_path / "pairs.jsonl"))
    with pytest.raises(InputError, match="it holds preference pairs, not samples"):
        load_samples(DataSettings.model_validate({"train": str(tmp_path / "pairs")}), TINY)


def test_a_tokenizer_without_a_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        load(build(tmp_path, *two_pairs()), tiny_tokenizer(None))


def test_a_set_with_nothing_left_names_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"every one of 2 pairs was refused: too_long 2 ") as error:
        load(build(tmp_path, row(20, 9, 9), row(30, 9, 9)), max_tokens=10)
    assert "first: pairs:1.chosen|pairs:1.rejected: chosen: 29 tokens" in str(error.value)
    assert "way out: raise data.max_tokens (10)" in str(error.value)


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


def test_rendered_pairs_are_cached_and_come_back_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(
        tmp_path, MULTI_TURN, {**MULTI_TURN, "rejected": "w", "group": "g"}, {**MULTI_TURN, "rejected": "y" * 99}
    )
    first = load(folder, TINY, max_tokens=90)

    def never(*_: object) -> None:
        raise AssertionError("rendered again")

    monkeypatch.setattr(pair_loading, "render_pair", never)
    again = load(folder, TINY, max_tokens=90)
    assert again.statistics == first.statistics
    assert first.statistics.refusals["too_long"].count == 1
    for one, other in zip(first.train[0].pairs, again.train[0].pairs, strict=True):
        assert (one.pair_id, one.group_id, one.task_id, one.cuts) == (
            other.pair_id,
            other.group_id,
            other.task_id,
            other.cuts,
        )
        for sample, same in zip(one.samples, other.samples, strict=True):
            assert (sample.sample_id, sample.group_id, sample.cuts) == (same.sample_id, same.group_id, same.cuts)
            assert sample.token_ids_S.tolist() == same.token_ids_S.tolist()
            assert sample.weights_S.tolist() == same.weights_S.tolist()
    with pytest.raises(AssertionError, match="rendered again"):
        load(folder, TINY, max_tokens=91)


def test_statistics_are_plain_json_values(tmp_path: Path) -> None:
    statistics = load(build(tmp_path, *two_pairs())).statistics
    assert json.loads(json.dumps(statistics.as_dict()))["train"]["pairs"]["pairs"] == 2


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
