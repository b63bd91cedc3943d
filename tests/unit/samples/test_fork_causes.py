"""Why sharing breaks: each cause made on purpose with a template of its own, and counted on real runs by their logs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tests.fixtures_tokenizers import CHATML, DATA, PLAIN_TURNS, tiny_tokenizer
from tests.rendering_cases import assistant, renderer, system, trajectory, user

from traceforge.config import DataSettings
from traceforge.samples.build import build_sft
from traceforge.samples.dataset import load_samples
from traceforge.samples.fork_causes import explain_forks
from traceforge.samples.references import open_built
from traceforge.samples.tokens import Sample
from traceforge.samples.tree_report import grouped
from traceforge.samples.tree_views import example_parts
from traceforge.trajectories.ingest import ingest
from traceforge.trajectories.record import Message

# As Qwen3: the last turn has its reasoning, or an empty block; turns before it have neither.
REASONING_ONCE = CHATML.replace(
    "m.content + '<|im_end|>",
    "('<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' if loop.last and m.role == 'assistant' else '')"
    " + m.content + '<|im_end|>",
)
# As DeepSeek-R1: reasoning stands inside the text, and is cut out of earlier turns.
REASONING_INSIDE = CHATML.replace(
    "m.content + '<|im_end|>", "(m.content if loop.last else m.content.split('</think>')[-1]) + '<|im_end|>"
)
COUNTS_QUESTIONS = "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} questions\n" + CHATML
REASONING_IN_THE_PROMPT = REASONING_ONCE.replace("<|im_start|>assistant\n'", "<|im_start|>assistant\n<think>\n'")


def observed(content: str) -> Message:
    return user(content, observation=True)


def run_of(*replies: Message, observation: str = "seen") -> list[Message]:
    messages = [system("be good"), user("do it")]
    for number, reply in enumerate(replies):
        messages += [reply, observed(f"{observation} {number}.")]
    return messages


def explained(tokenizer, messages, **settings):
    """Return the continuity of a trajectory's turns, and its samples."""
    run = trajectory(*messages)
    one = renderer(tokenizer, **settings)
    made = [one.render(run, index, group_id="run") for index in run.turns()]
    samples = [each for each in made if isinstance(each, Sample)]
    assert len(samples) > 1, made

    def decode(ids):
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    transcript = settings.get("rendering") == "transcript"
    return explain_forks(grouped(samples), [run], decode, transcript=transcript), samples


def causes(found) -> dict[str, int]:
    assert found.pairs == found.continued + sum(each.forks for each in found.causes)
    return {each.cause: each.forks for each in found.causes}


def test_a_template_that_only_adds_continues_every_turn() -> None:
    replies = [assistant(f"act {n}", reasoning="not rendered") for n in range(4)]
    found, _ = explained(tiny_tokenizer(CHATML), run_of(*replies))
    assert (found.pairs, found.continued, found.causes) == (3, 3, ())


def test_reasoning_that_a_template_drops_is_named_and_an_empty_block_is_not() -> None:
    replies = [
        assistant("list the files", reasoning="I should look around first."),
        assistant("read one"),
        assistant("write it", reasoning="Now I know what is wrong."),
        assistant("done"),
    ]
    found, samples = explained(tiny_tokenizer(REASONING_ONCE), run_of(*replies))
    assert causes(found) == {"reasoning_dropped": 2, "last_turn_differs": 1}
    first = found.causes[0].example
    assert (first.sample_id, first.next_sample_id) == ("run#0", "run#1")
    assert first.before.endswith("<|im_start|>assistant\n")
    assert first.text.startswith("<think>\nI should look around first.\n</think>\n\nlist")
    assert first.next_text.startswith("list the files<|im_end|>")
    shared = samples[0].token_ids_S[: first.depth]
    assert np.array_equal(shared, samples[1].token_ids_S[: first.depth])
    assert samples[0].token_ids_S[first.depth] != samples[1].token_ids_S[first.depth]
    assert found.causes[1].example.text.startswith("<think>\n\n</think>\n\nread one")


def test_what_the_next_turn_cannot_use_is_counted_in_tokens() -> None:
    replies = [assistant("act", reasoning="hm"), assistant("act again", reasoning="well"), assistant("end")]
    found, samples = explained(tiny_tokenizer(REASONING_ONCE), run_of(*replies))
    wanted = 0
    for one, other in pairwise(samples):
        left, right = one.token_ids_S.tolist(), other.token_ids_S.tolist()
        wanted += len(left) - next(n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    assert sum(each.tokens for each in found.causes) == wanted


def test_reasoning_inside_the_text_is_found_there() -> None:
    replies = [assistant(f"<think>\nidea {n}\n</think>\n\nact {n}") for n in range(3)]
    found, _ = explained(tiny_tokenizer(REASONING_INSIDE), run_of(*replies))
    assert causes(found) == {"reasoning_dropped": 2}


def test_a_generation_prompt_that_opens_the_reasoning_makes_no_other_cause() -> None:
    replies = [assistant("list", reasoning="look"), assistant("read", reasoning="so"), assistant("x", reasoning="end")]
    found, _ = explained(tiny_tokenizer(REASONING_IN_THE_PROMPT), run_of(*replies))
    assert causes(found) == {"reasoning_dropped": 2}


def test_reasoning_that_begins_like_the_text_is_still_seen_to_be_dropped() -> None:
    # No tags: the fork falls inside the reasoning, not before it.
    template = REASONING_ONCE.replace("'<think>\n' + ", "").replace(" + '\n</think>\n\n'", " + '\n'")
    replies = [assistant("I will read it.", reasoning="I will think about it, then read."), assistant("done")]
    found, _ = explained(tiny_tokenizer(template), run_of(*replies))
    assert causes(found) == {"reasoning_dropped": 1}
    assert found.causes[0].example.before.endswith("assistant\nI will ")


def test_dropping_the_oldest_observations_is_named_where_it_differs() -> None:
    replies = [assistant(f"act {n}") for n in range(5)]
    messages = run_of(*replies, observation="a long line of output that fills the window " * 3)
    tokenizer = tiny_tokenizer(CHATML)
    found, samples = explained(tokenizer, messages, max_tokens=200, length_policy="drop_oldest")
    assert [bool(each.cuts) for each in samples] == [False, False, True, True]  # the fifth does not fit at all
    assert causes(found) == {"cuts_differ": found.pairs - found.continued}
    assert found.causes[0].forks > 1
    assert found.causes[0].example.next_text.startswith("[... observation omitted ...]")
    same, _ = explained(
        tokenizer, messages, max_tokens=2000, observation_limit_tokens=8, length_policy="shorten_observations"
    )
    assert causes(same) == {}


def test_a_sample_that_is_cut_at_its_end_is_still_continued() -> None:
    messages = run_of(*(assistant(f"the answer {n} " * 20) for n in range(3)), observation="x")
    settings = {"max_tokens": 240, "length_policy": "truncate_end", "loss_on": "all"}
    found, samples = explained(tiny_tokenizer(CHATML), messages, **settings)
    assert [each.cuts for each in samples] == [(), ("cut_at_end",), ("cut_at_end",)]
    assert (found.pairs, found.continued) == (2, 2)


def test_a_token_over_the_border_is_the_same_text_in_other_tokens() -> None:
    # The prompt ends in a blank; in the history the same blank belongs to the word behind it.
    found, samples = explained(tiny_tokenizer(PLAIN_TURNS), run_of(assistant("the tests"), assistant("the command")))
    assert "border_merge" in samples[0].cuts
    assert causes(found) == {"tokens_merge": 1}
    assert found.causes[0].tokens == samples[0].num_tokens - found.causes[0].example.depth


def test_the_closing_line_of_a_transcript_is_named() -> None:
    messages = run_of(*(assistant(f"act {n}", reasoning="because") for n in range(3)))
    for template in (CHATML, REASONING_ONCE):
        found, _ = explained(tiny_tokenizer(template), messages, rendering="transcript")
        assert causes(found) == {"transcript_closes_prompt": 2}
        assert "Predict next action." in found.causes[0].example.text


@pytest.mark.parametrize("settings", [{}, {"loss_on": "all"}])
def test_a_difference_in_the_history_is_other_and_shown(settings) -> None:
    found, _ = explained(tiny_tokenizer(COUNTS_QUESTIONS), run_of(assistant("a"), assistant("b")), **settings)
    assert causes(found) == {"other": 1}
    assert found.causes[0].example.text.startswith("1 questions")
    assert found.causes[0].example.next_text.startswith("2 questions")


def fenced(number: int) -> Message:
    return assistant(f"THOUGHT: look at {number}.\n\n```bash\ncat {number}.py\n```")


@pytest.mark.parametrize("settings", [{}, {"loss_on": "all"}, {"target": "action"}])
def test_the_last_turn_is_told_from_the_history_whatever_is_trained(settings) -> None:
    found, _ = explained(tiny_tokenizer(REASONING_ONCE), run_of(*(fenced(n) for n in range(4))), **settings)
    assert causes(found) == {"last_turn_differs": 3}
    found, _ = explained(tiny_tokenizer(COUNTS_QUESTIONS), run_of(*(fenced(n) for n in range(4))), **settings)
    assert causes(found) == {"other": 3}


def test_line_ends_of_an_example_are_shown_and_the_place_is_named() -> None:
    found, _ = explained(tiny_tokenizer(REASONING_ONCE), run_of(assistant("a"), assistant("b")))
    where, before, text, next_text = example_parts(found.causes[0].example)
    assert where == f"run#0 and #1 after {found.causes[0].example.depth:,} tokens"
    assert before.endswith("<|im_start|>assistant⏎")
    assert text.startswith("<think>⏎⏎</think>⏎⏎a<|im_end|>")
    assert "\n" not in before + text + next_text


def test_a_trajectory_without_samples_and_one_with_a_single_turn_are_no_pairs() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    _, samples = explained(tokenizer, run_of(assistant("a"), assistant("b")))
    found = explain_forks({"run": samples[:1]}, [trajectory(user("x"))], lambda ids: "", transcript=False)
    assert (found.pairs, found.continued, found.causes) == (0, 0, ())


LOGS = {
    "mini-swe-agent-v1/astropy__astropy-12907.traj.json": "drops reasoning, or an empty block, at every turn",
    "mini-swe-agent-v2/derived__scikit-learn__scikit-learn-14141.traj.json": "tool calls: the template keeps reasoning",
}


@pytest.mark.parametrize("log", LOGS)
def test_the_causes_in_a_real_run_are_those_that_its_log_tells(log, qwen3_tokenizer, tmp_path) -> None:
    ingest([str(DATA / "trajectories" / log)], tmp_path / "in")
    build_sft(tmp_path / "in", tmp_path / "sft")
    data = DataSettings(train=str(tmp_path / "sft"), max_tokens=32_768)
    groups = grouped(load_samples(data, qwen3_tokenizer).train[0].samples)
    records = [trajectory for trajectory, _ in open_built(tmp_path / "sft").trajectories()]

    def decode(ids):
        return qwen3_tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    found = explain_forks(groups, records, decode, transcript=False)
    (run,) = records
    turns = [run.messages[index] for index in run.turns()]
    assert found.pairs == len(turns) - 1 > 3
    if "v2" in log:  # results of tools are no new question: history keeps its blocks
        assert causes(found) == {}
        return
    reasoned = sum(bool(turn.reasoning) for turn in turns[:-1])
    assert 0 < reasoned < found.pairs
    assert causes(found) == {"last_turn_differs": found.pairs - reasoned, "reasoning_dropped": reasoned}
