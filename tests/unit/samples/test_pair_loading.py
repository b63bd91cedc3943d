"""Loading the pairs of a run: split, leaks, groups, statistics, settings and the cache."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures_tokenizers import DEFAULT_SYSTEM, tiny_tokenizer
from tests.pair_cases import MULTI_TURN, TINY, build, load, row, two_pairs

from traceforge.config import DataSettings
from traceforge.errors import ConfigError, InputError, TemplateError
from traceforge.samples import pair_loading
from traceforge.samples.dataset import load_samples


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
