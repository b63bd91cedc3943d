"""Length policies: what is cut, where, and what is counted."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures_tokenizers import CHATML, tiny_tokenizer
from tests.rendering_cases import assistant, attempted, refused, rendered, renderer, system, text_of, trajectory, user

from traceforge.samples.encoding import TextEncoder
from traceforge.samples.lengths import DROPPED_MARKER, fewest, shorten, telling_prefix
from traceforge.samples.render import Refusal

TOKENIZER = tiny_tokenizer(CHATML)
ENCODER = TextEncoder(TOKENIZER)
MARKER = re.compile(r"\n\[\.\.\. (\d+) characters omitted \.\.\.\]\n")


def num_tokens(text: str) -> int:
    return len(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def long_run(turns: int = 4, observation: str = "word " * 300) -> object:
    messages = [system("s"), user("the task " * 20)]
    for number in range(turns):
        messages += [assistant(f"turn {number}"), user(f"{number}: {observation}", observation=True)]
    return trajectory(*messages, assistant("Done."))


def test_a_long_observation_keeps_its_head_and_tail_and_says_how_much_is_missing() -> None:
    text = " ".join(str(number) for number in range(1000))
    short = shorten(text, 20, ENCODER)
    assert short is not None
    (marker,) = MARKER.finditer(short)
    head, tail = short[: marker.start()], short[marker.end() :]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert int(marker[1]) == len(text) - len(head) - len(tail)
    assert (num_tokens(head), num_tokens(tail)) == (10, 10)


def test_an_observation_within_the_limit_is_left_alone() -> None:
    assert shorten("a b c", num_tokens("a b c"), ENCODER) is None


def test_an_observation_is_not_shortened_when_the_marker_would_be_longer_than_what_it_replaces() -> None:
    text = "x y z " * 4
    assert shorten(text, num_tokens(text) - 1, ENCODER) is None


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=1, max_size=400), st.integers(8, 40))
def test_shortening_never_breaks_a_character_and_keeps_a_true_head_and_tail(text: str, limit: int) -> None:
    short = shorten(text, limit, ENCODER)
    if short is None:
        return
    marker = next(found for found in MARKER.finditer(short) if len(text) - len(short) + len(found[0]) == int(found[1]))
    assert text.startswith(short[: marker.start()])
    assert text.endswith(short[marker.end() :])


def test_a_huge_observation_is_shortened_from_windows_at_its_ends_as_from_the_whole() -> None:
    text = " ".join(f"line {number}: the output of the tool" for number in range(3000))
    ids = ENCODER.encode_whole([text])[0]
    short = shorten(text, 50, ENCODER)
    assert short is not None
    assert short.startswith(text[: ids.stops[24]] + "\n[...")
    assert short.endswith("...]\n" + text[ids.starts[-25] :])


def test_shortened_observations_are_the_same_in_every_sample_of_a_trajectory() -> None:
    run = long_run()
    samples = [
        rendered(TOKENIZER, run, index, length_policy="shorten_observations", observation_limit_tokens=20)
        for index in run.turns()
    ]
    texts = [text_of(TOKENIZER, sample) for sample in samples]
    for shorter, longer in itertools.pairwise(texts):
        assert longer.startswith(shorter.removesuffix("\n"))
    assert [sample.cuts for sample in samples] == [(), *[("observations_shortened",)] * 4]
    assert all("the task the task" in text for text in texts)
    assert texts[-1].count("characters omitted") == 4


def test_only_observations_are_shortened_never_the_task_or_a_turn() -> None:
    long = "many words here " * 100
    run = trajectory(system(long), user(long), assistant(long), user("ok", observation=True), assistant(long))
    sample = rendered(TOKENIZER, run, length_policy="shorten_observations", observation_limit_tokens=8)
    assert sample.cuts == ()
    assert text_of(TOKENIZER, sample).count(long) == 4


@pytest.mark.parametrize("policy", ["shorten_observations", "refuse"])
def test_a_sample_that_is_still_too_long_is_refused_with_its_length(policy: str) -> None:
    run = trajectory(user("many words here " * 100), assistant("a"))
    length = rendered(TOKENIZER, run).num_tokens
    outcome = refused(TOKENIZER, run, length_policy=policy, max_tokens=length - 1)
    assert outcome.code == "too_long"
    assert f"{length} tokens" in outcome.detail
    assert rendered(TOKENIZER, run, length_policy=policy, max_tokens=length).num_tokens == length


def test_the_oldest_observations_are_dropped_as_few_as_it_takes() -> None:
    run = long_run(turns=4)
    whole = rendered(TOKENIZER, run).num_tokens
    sample = rendered(TOKENIZER, run, length_policy="drop_oldest", max_tokens=whole - 1)
    text = text_of(TOKENIZER, sample)
    assert text.count(DROPPED_MARKER) == 1
    assert text.index(DROPPED_MARKER) < text.index("turn 1")
    assert "0: word" not in text
    assert "1: word" in text
    assert sample.cuts == ("observations_dropped",)
    for limit in range(sample.num_tokens, whole, 150):
        fitted = rendered(TOKENIZER, run, length_policy="drop_oldest", max_tokens=limit)
        assert fitted.num_tokens <= limit
        assert "the task the task" in text_of(TOKENIZER, fitted)


def test_dropping_every_observation_may_not_be_enough() -> None:
    outcome = refused(TOKENIZER, long_run(turns=2), length_policy="drop_oldest", max_tokens=40)
    assert outcome.code == "too_long"
    assert "2 droppable observations" in outcome.detail


def test_cutting_at_the_end_keeps_the_first_tokens_and_is_counted() -> None:
    run = trajectory(user("a"), assistant("one two three four five six"))
    whole = rendered(TOKENIZER, run)
    cut = rendered(TOKENIZER, run, length_policy="truncate_end", max_tokens=whole.num_tokens - 3)
    assert cut.token_ids_S.tolist() == whole.token_ids_S[:-3].tolist()
    assert cut.weights_S.tolist() == whole.weights_S[:-3].tolist()
    assert cut.cuts == ("cut_at_end",)
    _, ending = renderer(TOKENIZER, length_policy="truncate_end", max_tokens=whole.num_tokens - 3).text(run, 1)
    assert ending == TOKENIZER.decode(cut.token_ids_S[np.flatnonzero(cut.weights_S)].tolist())


def test_a_sample_with_nothing_trained_after_the_cut_is_refused() -> None:
    # A8: the prompt alone fills max_tokens.
    run = trajectory(user("a"), assistant("b"))
    prompt = rendered(TOKENIZER, run)
    num_prompt = int(np.flatnonzero(prompt.weights_S)[0])
    outcome = refused(TOKENIZER, run, length_policy="truncate_end", max_tokens=num_prompt)
    assert outcome.code == "nothing_trained"
    assert rendered(TOKENIZER, run, length_policy="truncate_end", max_tokens=num_prompt + 1).num_trained_tokens == 1


@pytest.mark.parametrize("policy", ["shorten_observations", "refuse", "drop_oldest", "truncate_end"])
def test_a_huge_observation_is_decided_by_a_beginning_of_it(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A29 in small: the limit above which only a prefix is tokenised is lowered from a million characters.
    monkeypatch.setattr("traceforge.samples.lengths._WHOLE_CHARS", 1000)
    run = trajectory(user("task"), assistant("look"), user("word " * 50_000, observation=True), assistant("Done."))
    outcome = attempted(TOKENIZER, run, length_policy=policy, max_tokens=150, observation_limit_tokens=20)
    if policy in ("shorten_observations", "drop_oldest"):
        assert not isinstance(outcome, Refusal)
        assert text_of(TOKENIZER, outcome).endswith("Done.<|im_end|>\n")
    else:
        assert isinstance(outcome, Refusal)
        assert outcome.code == {"refuse": "too_long", "truncate_end": "nothing_trained"}[policy]


def test_the_telling_prefix_of_a_text_of_few_tokens_is_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceforge.samples.lengths._WHOLE_CHARS", 1000)
    assert telling_prefix("<|im_end|>" * 300, 1000, ENCODER) == 3000
    assert telling_prefix("word " * 10_000, 10, ENCODER) < 50_000


def test_fewest_finds_the_smallest_count_that_fits() -> None:
    for answer in range(1, 8):
        assert fewest(7, lambda count, answer=answer: count >= answer) == answer
    assert fewest(7, lambda count: False) is None
    assert fewest(0, lambda count: True) is None
