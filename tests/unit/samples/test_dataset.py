"""Loading the samples of a run: split, leaks, groups, statistics, provenance and the cache."""

from __future__ import annotations

import hashlib
import json
import os

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.dataset_stubs import (
    ByteRenderer,
    ByteTokenizer,
    assistant,
    built,
    run_of,
    sample,
    settings_for,
    trajectory,
    user,
)

from traceforge.config import DataSettings
from traceforge.errors import ConfigError, InputError
from traceforge.samples import dataset, sources
from traceforge.samples.dataset import load_samples
from traceforge.samples.statistics import describe_samples, describe_trees, ids_hash, prefix_tree_tokens
from traceforge.trajectories.record import Message

IDS_HASH = "37d59513263b03317b88426f62057527269237320725bd3a418375d7bfa5eb96"


@pytest.fixture(autouse=True)
def _bytes_for_tokens(monkeypatch):
    monkeypatch.setattr(sources, "TurnRenderer", ByteRenderer)
    monkeypatch.setattr(dataset, "default_system_prompt", lambda tokenizer: "You are a byte.")
    ByteRenderer.calls = 0


def load(path, **fields):
    return load_samples(settings_for(path, **fields), ByteTokenizer())


def ids(samples):
    return [one.sample_id for one in samples]


def write_rows(path, count, text="row"):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{text} {number}:", "completion": f" {number}"} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_reference_becomes_a_sample_in_file_order(tmp_path) -> None:
    sets = load(built(tmp_path, run_of("b", 2), run_of("a", 1)))
    assert ids(sets.train[0].samples) == ["b#0", "b#1", "a#0"]
    assert sets.evaluation == ()
    assert sets.train[0].weight == 1.0
    text = ByteTokenizer().decode(sets.train[0].samples[1].token_ids_S)
    assert text == "b: task.act 0.seen 0.act 1.</s>"


def test_a_quarter_of_four_trajectories_holds_out_one_of_them_whole(tmp_path) -> None:
    sets = load(built(tmp_path, *(run_of(f"run-{number}", 10) for number in range(4))), evaluation_fraction=0.25)
    held = {one.task_id for one in sets.evaluation}
    trained = {one.task_id for one in sets.train[0].samples}
    assert len(held) == 1
    assert len(sets.evaluation) == 10
    assert len(sets.train[0].samples) == 30
    assert held & trained == set()


def test_two_runs_of_one_task_are_on_one_side(tmp_path) -> None:
    runs = [run_of(f"{task}-{run}", 1, task=task) for task in ("x", "y") for run in range(3)]
    sets = load(built(tmp_path, *runs), evaluation_fraction=0.5)
    assert len(sets.evaluation) == len(sets.train[0].samples) == 3
    assert {one.task_id for one in sets.evaluation}.isdisjoint(one.task_id for one in sets.train[0].samples)


def test_the_split_does_not_move_when_a_model_refuses_samples(tmp_path) -> None:
    folder = built(tmp_path, *(run_of(f"run-{number}", 6) for number in range(8)))
    wide = load(folder, evaluation_fraction=0.5)
    narrow = load(folder, evaluation_fraction=0.5, max_tokens=50)
    assert len(narrow.evaluation) < len(wide.evaluation)
    assert {one.task_id for one in narrow.evaluation} == {one.task_id for one in wide.evaluation}


def test_the_group_is_the_trajectory_or_the_sample(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 2))
    assert [one.group_id for one in load(folder).train[0].samples] == ["a", "a"]
    assert [one.group_id for one in load(folder, group="none").train[0].samples] == ["a#0", "a#1"]


def test_a_second_source_is_held_out_whole(tmp_path) -> None:
    train = built(tmp_path, run_of("a", 2), name="train")
    held = built(tmp_path, run_of("b", 3), name="held")
    sets = load(train, evaluation=str(held))
    assert ids(sets.evaluation) == ["b#0", "b#1", "b#2"]
    assert [(one.path, one.role, one.kept) for one in sets.statistics.sources] == [
        (str(train), "train", 2),
        (str(held), "evaluation", 3),
    ]


def test_a_sample_or_a_task_on_both_sides_is_an_error(tmp_path) -> None:
    train = built(tmp_path, run_of("a", 2), name="train")
    with pytest.raises(InputError, match=r"2 samples \(first: a#0\) and 1 tasks \(first: a\) are in both"):
        load(train, evaluation=str(train))
    other = built(tmp_path, run_of("another run", 1, task="a"), name="other")
    with pytest.raises(InputError, match=r"no sample and 1 tasks \(first: a\) are in both"):
        load(train, evaluation=str(other))


def test_one_id_for_two_different_samples_is_an_error(tmp_path) -> None:
    train = write_rows(tmp_path / "train/data.jsonl", 3, "train")
    held = write_rows(tmp_path / "held/data.jsonl", 3, "held")
    with pytest.raises(InputError, match="'data#0' names two different samples") as caught:
        load(train, evaluation=str(held))
    assert caught.value.hint == "rename one of the files"


def test_the_same_source_twice_is_fine_and_is_held_out_once(tmp_path) -> None:
    folder = str(built(tmp_path, *(run_of(f"run-{number}", 2) for number in range(4))))
    settings = DataSettings.model_validate(
        {"train": [{"path": folder, "weight": 2.0}, {"path": folder, "weight": 0.5}], "evaluation_fraction": 0.25}
    )
    sets = load_samples(settings, ByteTokenizer())
    assert [one.weight for one in sets.train] == [2.0, 0.5]
    assert ids(sets.train[0].samples) == ids(sets.train[1].samples)
    assert len(sets.evaluation) == 2
    assert sets.statistics.dataset_id == folder
    assert sets.statistics.train.repeated_prefix_share == load(folder).statistics.train.repeated_prefix_share


def test_every_sample_refused_names_the_reasons_and_the_way_out(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 3), trajectory("b", user("go"), assistant("{{ x }}")))
    with pytest.raises(
        InputError, match=r"every one of 4 samples was refused: template_error 1 .*; too_long 3 \("
    ) as e:
        load(folder, max_tokens=10)
    assert e.value.hint == "raise data.max_tokens (10) or lower data.observation_limit_tokens (1024)"
    only_template = built(tmp_path, trajectory("b", user("go"), assistant("{{ x }}")), name="t")
    with pytest.raises(InputError, match=r"template_error 1 \(first: b#0: the template says: no braces\)"):
        load(only_template)
    rows = write_rows(tmp_path / "rows.jsonl", 3)
    with pytest.raises(InputError, match="nothing_trained 3") as e:
        load(rows, max_tokens=6, length_policy="truncate_end")
    assert "the prompt alone fills it" in e.value.hint


def test_a_split_that_leaves_a_side_empty_is_an_error(tmp_path) -> None:
    long = trajectory("long", user("x" * 100), assistant("act"))
    hashes = lambda seed: [hashlib.sha256(f"{seed}:{task}".encode()).hexdigest() for task in ("long", "b")]  # noqa: E731
    seed = next(seed for seed in range(100) if hashes(seed)[0] < hashes(seed)[1])
    with pytest.raises(InputError, match=r"no sample of the 1 held-out tasks \(long…\) is left; refused: too_long 1"):
        load(built(tmp_path, long, run_of("b", 2)), max_tokens=60, evaluation_fraction=0.5, seed=seed)


def test_refusals_and_cuts_are_counted_with_examples(tmp_path) -> None:
    runs = [run_of(f"r{number}", 3) for number in range(10)]
    statistics = load(
        built(tmp_path, *runs, trajectory("c", user("cut me"), assistant("ok"))), max_tokens=20
    ).statistics
    refused = statistics.refusals["too_long"]
    assert refused.count == 20
    assert refused.examples[:2] == ("r0#1", "r0#2")
    assert refused.detail == "29 tokens, data.max_tokens is 20"
    assert statistics.train.samples + refused.count == 31
    assert statistics.train.cuts == {"observations_shortened": 1}
    assert statistics.train.cut_samples == 1
    assert (statistics.sources[0].available, statistics.sources[0].kept) == (31, 11)
    json.dumps(statistics.as_dict())


def test_no_more_than_twenty_examples_of_a_refusal_are_kept(tmp_path) -> None:
    statistics = load(built(tmp_path, *(run_of(f"r{number}", 3) for number in range(20))), max_tokens=20).statistics
    assert statistics.refusals["too_long"].count > 20
    assert len(statistics.refusals["too_long"].examples) == 20


def test_the_numbers_of_a_set_are_right() -> None:
    # Prompts p, endings e: "ppp e" (4), "ppp e q e" (6) in one group; "z e e" (3) alone.
    first = sample("a#0", [7, 7, 7, 9], [0, 0, 0, 1], "a")
    second = sample("a#1", [7, 7, 7, 9, 8, 9], [0, 0, 0, 0, 0, 2], "a")
    third = sample("b#0", [5, 9, 9], [0, 1, 1], "b")
    found = describe_samples([[first, second, third]])
    assert (found.samples, found.tasks, found.trajectories) == (3, 2, 2)
    assert (found.tokens_total, found.tokens_min, found.tokens_median, found.tokens_max) == (13, 3, 4.0, 6)
    assert found.trained_tokens == 4
    assert found.trained_share == 4 / 13
    assert found.total_weight == 5.0
    assert found.repeated_prefix_share == pytest.approx(4 / 13)  # tree of a: 6 tokens, of b: 3; 13 - 9 repeat.
    assert describe_samples([[first]], train=[second, first]).identical_in_train == 1


def test_the_trees_of_a_training_set_are_those_of_the_groups_that_its_updates_draw(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 3), run_of("b", 2))
    # Bytes: "a: task." 8, "act n." 6, "seen n." 7, end 1; samples of 15, 28, 41 and 15, 28. Each turn forks at its end.
    trees = load(folder).statistics.train_trees
    assert (trees.group, trees.sample_tokens, trees.trees) == ("trajectory", 127, 2)
    assert (trees.tree_tokens, trees.forks) == (41 + 2 + 28 + 1, 3)
    apart = load(folder, group="none").statistics.train_trees
    assert (apart.group, apart.sample_tokens, apart.tree_tokens) == ("none", 127, 127)
    assert (apart.trees, apart.forks) == (5, 0)


def test_the_same_source_given_twice_makes_two_trees() -> None:
    members = [sample("a#0", [7, 7, 9], [0, 0, 1], "a"), sample("a#1", [7, 7, 8, 9], [0, 0, 0, 1], "a")]
    once, twice = (describe_trees([members] * times, group="trajectory") for times in (1, 2))
    assert (once.sample_tokens, once.tree_tokens, once.trees, once.forks) == (7, 5, 1, 1)
    assert (twice.sample_tokens, twice.tree_tokens, twice.trees, twice.forks) == (14, 10, 2, 2)


def test_the_95th_percentile_is_a_length_that_occurs() -> None:
    lengths = [*range(1, 20), 1000]
    samples = [sample(f"{length}#0", [1] * length, [0] * length) for length in lengths]
    assert describe_samples([samples]).tokens_p95 == 19
    assert describe_samples([samples[:2]]).tokens_median == 1.5


@given(st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), min_size=1, max_size=6)), min_size=1))
def test_prefix_tree_tokens_are_the_distinct_prefixes_of_each_group(drawn) -> None:
    samples = [
        sample(f"{number}", list(tokens), [0] * len(tokens), group) for number, (group, tokens) in enumerate(drawn)
    ]
    prefixes = {(group, tuple(tokens[:end])) for group, tokens in drawn for end in range(1, len(tokens) + 1)}
    assert prefix_tree_tokens(samples) == len(prefixes)


def test_the_hash_of_sample_ids_never_changes() -> None:
    # printf 'a#0\na#1\nb#0' | sha256sum
    assert ids_hash(["a#0", "a#1", "b#0"]) == IDS_HASH
    assert ids_hash(["a#1", "a#0", "b#0"]) != IDS_HASH


def test_the_provenance_of_a_local_folder_is_the_hash_of_its_files(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 2))
    digests = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("trajectories.jsonl", "sft.jsonl")]
    found = load(folder).statistics
    assert found.content_hash == hashlib.sha256("\n".join(digests).encode()).hexdigest()
    assert found.resolution_source == "local_hash"
    assert (found.requested_revision, found.resolved_commit) == (None, None)
    assert found.train_ids_hash == ids_hash(["a#0", "a#1"])
    assert found.evaluation_ids_hash is None


def test_rows_of_a_file_are_selected_for_both_sides(tmp_path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 40)
    sets = load(path, train_rows=5, evaluation_rows=3)
    again = load(path, train_rows=5, evaluation_rows=3)
    assert len(sets.train[0].samples) == 5
    assert len(sets.evaluation) == 3
    assert set(ids(sets.evaluation)).isdisjoint(ids(sets.train[0].samples))
    assert again.statistics == sets.statistics
    assert sets.statistics.sources[0].examined == 8
    assert sets.statistics.content_hash == hashlib.sha256(path.read_bytes()).hexdigest()
    assert all(one.group_id == one.sample_id == one.task_id for one in sets.evaluation)


def test_rows_of_a_hub_data_set_carry_their_commit(monkeypatch) -> None:
    from traceforge.samples.row_files import checked_rows

    commit = "c" * 40
    rows = [{"instruction": f"say {number}", "output": f"{number}"} for number in range(9)]
    monkeypatch.setattr(sources, "resolve_commit", lambda dataset_id, revision: commit)
    monkeypatch.setattr(
        sources,
        "load_hub_rows",
        lambda dataset_id, commit: checked_rows(dataset_id, dataset_id, rows, content_hash="h"),
    )
    found = load("owner/name", train_rows=2, evaluation_rows=1, revision="main").statistics
    assert found.dataset_id == "owner/name"
    assert (found.requested_revision, found.resolved_commit, found.resolution_source) == ("main", commit, "hub")
    assert found.content_hash == "h"


def test_settings_that_the_sources_cannot_honour_are_refused(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 2))
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    with pytest.raises(ConfigError, match="choose rows of row files"):
        load(folder, train_rows=1)
    with pytest.raises(ConfigError, match=r"data.train_rows = 2 .* data.evaluation_fraction = 0.5"):
        load(rows, train_rows=2, evaluation_fraction=0.5)
    with pytest.raises(ConfigError, match=r"data.revision = 'main' is for hub ids"):
        load(rows, revision="main")
    both = DataSettings.model_validate({"train": [{"path": str(rows)}, {"path": str(rows)}], "train_rows": 1})
    with pytest.raises(ConfigError, match=r"data.train names 2"):
        load_samples(both, ByteTokenizer())
    with pytest.raises(InputError, match=r"nowhere\.jsonl: no such file or folder"):
        load("data/nowhere.jsonl")


def test_a_template_that_speaks_for_itself_is_told_of(tmp_path) -> None:
    with_system = trajectory("s", Message(role="system", content="sys"), user("go"), assistant("ok"))
    found = load(built(tmp_path, with_system, run_of("a", 2))).statistics
    assert found.default_system_prompt == "You are a byte."
    assert found.samples_with_default_system_prompt == 2
    alone = load(built(tmp_path, with_system, name="alone")).statistics
    assert (alone.default_system_prompt, alone.samples_with_default_system_prompt) == (None, 0)


def cache_of(folder):
    return sorted((folder / ".cache").glob("*.npz"))


def same(left, right):
    return all(
        (one.sample_id, one.group_id, one.task_id, one.cuts) == (two.sample_id, two.group_id, two.task_id, two.cuts)
        and one.token_ids_S.dtype == two.token_ids_S.dtype
        and one.weights_S.dtype == two.weights_S.dtype
        and np.array_equal(one.token_ids_S, two.token_ids_S)
        and np.array_equal(one.weights_S, two.weights_S)
        for one, two in zip(left, right, strict=True)
    )


def test_a_cache_hit_gives_the_same_samples_and_statistics_without_rendering(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 4), run_of("b", 3), trajectory("c", user("cut me"), assistant("ok")))
    first = load(folder, max_tokens=40)
    assert ByteRenderer.calls == 8
    second = load(folder, max_tokens=40)
    assert ByteRenderer.calls == 8
    assert same(first.train[0].samples, second.train[0].samples)
    assert msgspec.to_builtins(first.statistics) == msgspec.to_builtins(second.statistics)
    assert first.statistics.refusals


def test_another_renderer_or_other_data_is_another_cache(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 2))
    load(folder)
    load(folder, max_tokens=999)
    assert len(cache_of(folder)) == 2
    calls = ByteRenderer.calls
    built(tmp_path, run_of("a", 3))
    assert len(load(folder).train[0].samples) == 3
    assert ByteRenderer.calls == calls + 3


@pytest.mark.parametrize("damage", ["empty", "half", "text", "flipped", "other arrays", "short weights"])
def test_a_damaged_cache_is_rebuilt(tmp_path, damage) -> None:
    folder = built(tmp_path, run_of("a", 4))
    first = load(folder)
    (path,) = cache_of(folder)
    content = path.read_bytes()
    if damage in {"other arrays", "short weights"}:
        with np.load(path) as arrays:
            held = {name: arrays[name] for name in arrays.files}
        held = {"x": held["about"]} if damage == "other arrays" else held | {"run_lengths": held["run_lengths"] // 2}
        with path.open("wb") as handle:
            np.savez(handle, **held)
    else:
        flipped = bytearray(content)
        flipped[len(flipped) // 2] ^= 0xFF
        path.write_bytes(
            {"empty": b"", "half": content[: len(content) // 2], "text": b"not a cache", "flipped": bytes(flipped)}[
                damage
            ]
        )
    again = load(folder)
    assert same(first.train[0].samples, again.train[0].samples)
    assert ByteRenderer.calls == 8
    assert path.read_bytes() == content or damage
    load(folder)
    assert ByteRenderer.calls == 8


def test_a_folder_that_cannot_be_written_has_no_cache_and_no_error(tmp_path, monkeypatch) -> None:
    folder = built(tmp_path, run_of("a", 2))
    (folder / ".cache").write_text("a file where the folder should be")
    assert len(load(folder).train[0].samples) == 2
    assert sorted(os.listdir(folder)) == [".cache", "manifest.json", "sft.jsonl", "trajectories.jsonl"]


def test_the_cache_grows_with_turns_and_not_with_their_histories(tmp_path) -> None:
    def cached_bytes(turns, name):
        rng = np.random.default_rng(0)
        messages = [user("go")]
        for _ in range(turns):
            messages += [assistant(rng.bytes(200).hex()), user(rng.bytes(200).hex())]
        folder = built(tmp_path, trajectory("a", *messages), name=name)
        load(folder, max_tokens=100_000)
        return cache_of(folder)[0].stat().st_size

    assert cached_bytes(40, "long") < 2.2 * cached_bytes(20, "short")


def test_only_the_newest_caches_of_a_folder_are_kept(tmp_path) -> None:
    folder = built(tmp_path, run_of("a", 1))
    for limit in range(100, 112):
        load(folder, max_tokens=limit)
    assert len(cache_of(folder)) == 8
