"""What templates do with messages, and how one that cannot express a conversation is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fixtures_tokenizers import (
    CALLS_WITHOUT_TEXT,
    CHATML,
    CHATML_TOOLS_OBJECT,
    CHATML_TOOLS_TEXT,
    CONTENT_PARTS,
    EOS_AT_THE_END,
    GEMMA,
    HEADERS_ONLY,
    MISTRAL,
    PLAIN_TURNS,
    TERMINATOR_WITH_NEXT,
    tiny_tokenizer,
)
from tests.rendering_cases import (
    assistant,
    call,
    refused,
    rendered,
    renderer,
    result,
    system,
    text_of,
    trained_parts,
    trajectory,
    user,
)

from traceforge.errors import ConfigError, InputError, TemplateError
from traceforge.samples.template import chat_messages, parsed_arguments
from traceforge.trajectories.record import Message, encode, read_trajectories

TOOLS = ({"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": {}}},)


@pytest.mark.parametrize("template", [CHATML_TOOLS_OBJECT, CHATML_TOOLS_TEXT])
def test_arguments_are_quoted_once_whether_the_template_wants_an_object_or_text(template: str) -> None:
    # A16, and the kind behind it: a template that joins strings must not get Python's way to print a dict.
    tokenizer = tiny_tokenizer(template)
    run = trajectory(user("q"), assistant("", call("go", '{"city":"SF"}')), user("q"), assistant("a"))
    for index in (1, 3):
        text = text_of(tokenizer, rendered(tokenizer, run, index))
        assert '"arguments": {"city": "SF"}}' in text
        assert '\\"' not in text
        assert "'city'" not in text


def test_every_spelling_of_arguments_and_empty_content_gives_the_same_text() -> None:
    # A15: the record holds text; spacing, None, "" and an absent field must not show.
    tokenizer = tiny_tokenizer(CHATML_TOOLS_OBJECT)
    texts = set()
    for arguments, content in itertools.product(['{"city": "SF"}', '{"city":"SF"}'], [None, "", ...]):
        fields = {} if content is ... else {"content": content}
        turn = Message(role="assistant", tool_calls=(call("go", arguments),), **fields)
        texts.add(text_of(tokenizer, rendered(tokenizer, trajectory(user("q"), turn))))
    assert len(texts) == 1
    assert "None" not in texts.pop()


@pytest.mark.parametrize("arguments", ["{not json", "[1, 2]", '"text"', "", "[" * 100_000])
def test_arguments_that_are_no_json_object_are_kept_as_they_are_under_raw(arguments: str) -> None:
    assert parsed_arguments(arguments) == {"_raw": arguments}


def test_half_a_surrogate_pair_inside_arguments_becomes_the_replacement_character() -> None:
    # A28: valid text in the log, a lone surrogate once the JSON escape is read.
    tokenizer = tiny_tokenizer(CHATML_TOOLS_OBJECT)
    run = trajectory(user("q"), assistant("", call("go", r'{"a": "x\ud83d", "b": "\ud83d\udc4d"}')))
    text = text_of(tokenizer, rendered(tokenizer, run))
    assert '{"a": "x\ufffd", "b": "\U0001f44d"}' in text


def test_messages_reach_the_template_in_the_shape_it_reads() -> None:
    shaped = chat_messages(
        [
            assistant("", call("read", '{"a": 1}', "c1"), reasoning="why"),
            result("one", "c1"),
            result("two", "unknown"),
            assistant("", call("read", "{}")),
        ]
    )
    function = {"name": "read", "arguments": {"a": 1}}
    assert shaped[0] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "why",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    assert shaped[1] == {"role": "tool", "content": "one", "tool_call_id": "c1", "name": "read"}
    assert "name" not in shaped[2]
    assert "id" not in shaped[3]["tool_calls"][0]


def test_a_record_with_a_list_of_content_parts_is_refused_before_it_can_be_printed(tmp_path: Path) -> None:
    # A24: readers join parts; nothing behind them ever sees a list.
    line = encode(trajectory(user("a"), assistant("b"))).replace(b'"content":"a"', b'"content":[{"text":"a"}]')
    (tmp_path / "trajectories.jsonl").write_bytes(line + b"\n")
    with pytest.raises(InputError, match=r"trajectories\.jsonl:1"):
        list(read_trajectories(tmp_path / "trajectories.jsonl"))


def test_a_template_that_leaves_out_tool_calls_is_refused_instead_of_training_empty_turns() -> None:
    run = trajectory(user("q"), assistant("", call("go", "{}")), result("r"), assistant("Done."))
    for index in (1, 3):
        outcome = refused(tiny_tokenizer(CHATML), run, index)
        assert outcome.code == "tool_calls_not_rendered"
        assert "transcript" in outcome.detail


def test_a_template_that_leaves_out_a_role_is_refused() -> None:
    outcome = refused(tiny_tokenizer(MISTRAL), trajectory(system("s"), user("q"), assistant("a")))
    assert (outcome.code, "role system" in outcome.detail) == ("role_not_rendered", True)
    without_tool = CHATML.replace("%}{{ '<|im", "if m.role != 'tool' %}{{ '<|im", 1)
    outcome = refused(tiny_tokenizer(without_tool), trajectory(user("q"), assistant("a"), result("r"), assistant("b")))
    assert (outcome.code, "role tool" in outcome.detail) == ("role_not_rendered", True)


def test_reasoning_and_tools_that_the_template_leaves_out_are_counted() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    run = trajectory(user("q"), assistant("a", reasoning="because"), tools=TOOLS)
    assert rendered(tokenizer, run).cuts == ("reasoning_not_rendered", "tools_not_rendered")
    with_tools = rendered(tiny_tokenizer(CHATML_TOOLS_OBJECT), run)
    assert with_tools.cuts == ("reasoning_not_rendered",)
    assert '"name": "read"' in text_of(tokenizer, with_tools)


def test_a_template_that_expects_lists_of_parts_is_refused_instead_of_training_empty_turns() -> None:
    outcome = refused(tiny_tokenizer(CONTENT_PARTS), trajectory(user("q"), assistant("a")))
    assert (outcome.code, "role assistant" in outcome.detail) == ("role_not_rendered", True)


def test_text_that_a_template_leaves_out_beside_calls_is_counted() -> None:
    # A21: with such a template content is always empty after training; say so.
    tokenizer = tiny_tokenizer(CALLS_WITHOUT_TEXT)
    run = trajectory(user("q"), assistant("I look.", call("go", "{}")))
    assert rendered(tokenizer, run).cuts == ("text_not_rendered",)
    assert rendered(tokenizer, trajectory(user("q"), assistant("", call("go", "{}")))).cuts == ()


def test_a_role_that_the_template_refuses_is_named_with_message_and_trajectory() -> None:
    outcome = refused(tiny_tokenizer(GEMMA), trajectory(system("s"), user("q"), assistant("a")))
    assert outcome.code == "template_error"
    assert outcome.detail == ("the chat template fails at message 0 (role system) of run: System role not supported")


def test_neighbours_of_one_role_are_merged_for_a_template_that_demands_alternation() -> None:
    tokenizer = tiny_tokenizer(GEMMA)
    run = trajectory(user("task"), user("format error"), assistant("one"), assistant("two"), user("x"), assistant("a"))
    sample = rendered(tokenizer, run)
    assert sample.cuts == ("merged_messages",)
    assert text_of(tokenizer, sample) == (
        "<s><start_of_turn>user\ntask\n\nformat error<end_of_turn>\n<start_of_turn>model\none\n\ntwo<end_of_turn>\n"
        "<start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n"
    )
    assert trained_parts(tokenizer, sample) == ["a<end_of_turn>"]
    assert rendered(tiny_tokenizer(CHATML), run).cuts == (), "a template that takes them is given them"


def test_a_turn_is_never_merged_into_the_turn_before_it() -> None:
    outcome = refused(tiny_tokenizer(GEMMA), trajectory(user("q"), assistant("one"), assistant("two")))
    assert outcome.code == "template_error"
    assert "message 2 (role assistant) of run" in outcome.detail
    assert "must alternate" in outcome.detail


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("{{ messages[0].content.nothing.more }}", "no attribute 'nothing'"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "str"),
        ("{% for m in messages %}", "endfor"),
        ("{{ raise_exception('I never work') }}", "I never work"),
    ],
)
def test_a_template_that_always_fails_is_refused_in_its_own_words(broken: str, said: str) -> None:
    outcome = refused(tiny_tokenizer(broken), trajectory(user("q"), assistant("a")))
    assert outcome.code == "template_error"
    assert said in outcome.detail


def test_a_tokenizer_without_a_template_is_an_error_only_when_a_conversation_is_rendered() -> None:
    rendering = renderer(tiny_tokenizer(None))
    assert rendering.fingerprint
    with pytest.raises(TemplateError, match="no chat template") as caught:
        rendering.render(trajectory(user("q"), assistant("a")), 1, group_id="g")
    assert "model.template_file" in (caught.value.hint or "")


def test_template_arguments_that_the_renderer_sets_itself_cannot_be_given() -> None:
    with pytest.raises(ConfigError, match=r"template_kwargs\.add_generation_prompt"):
        renderer(tiny_tokenizer(CHATML), template_kwargs={"add_generation_prompt": True})


def test_template_arguments_reach_the_template() -> None:
    tokenizer = tiny_tokenizer("{{ mood }}" + CHATML)
    run = trajectory(user("q"), assistant("a"))
    sample = rendered(tokenizer, run, template_kwargs={"mood": "calm"})
    assert text_of(tokenizer, sample).startswith("calm<|im_start|>")


def test_a_terminator_that_comes_with_the_next_message_is_trained_at_the_end_of_the_turn() -> None:
    # A7: trl#5988. The end token stands before the next user message, never behind the last turn.
    tokenizer = tiny_tokenizer(TERMINATOR_WITH_NEXT)
    run = trajectory(user("q"), assistant("one"), user("q"), assistant("two"))
    for index, text in ((1, " one</s>"), (3, " two</s>")):
        sample = rendered(tokenizer, run, index)
        assert trained_parts(tokenizer, sample) == [text]
        assert sample.cuts == ()


def test_a_special_token_that_closes_a_call_is_not_taken_for_the_end_of_the_turn() -> None:
    tokenizer = tiny_tokenizer(TERMINATOR_WITH_NEXT)
    sample = rendered(tokenizer, trajectory(user("q"), assistant("", call("go", "{}"))))
    assert trained_parts(tokenizer, sample) == [" go({})<|call_end|></s>"]


def test_a_token_that_only_ends_the_conversation_is_no_part_of_the_turn() -> None:
    tokenizer = tiny_tokenizer(EOS_AT_THE_END)
    sample = rendered(tokenizer, trajectory(user("q"), assistant("one")))
    assert trained_parts(tokenizer, sample) == ["one<|im_end|>"]
    assert text_of(tokenizer, sample).endswith("one<|im_end|>\n")


@pytest.mark.parametrize("template", [PLAIN_TURNS, HEADERS_ONLY])
def test_eos_is_appended_and_counted_where_no_turn_has_a_terminator(template: str) -> None:
    # `<|user|>` of HEADERS_ONLY opens a message: a model that wrote it would not stop.
    tokenizer = tiny_tokenizer(template)
    sample = rendered(tokenizer, trajectory(user("q"), assistant("No.")))
    assert "eos_appended" in sample.cuts
    assert sample.token_ids_S[-1] == tokenizer.eos_token_id
    assert sample.weights_S[-1] == 1.0


def test_a_turn_that_nothing_could_end_is_refused() -> None:
    outcome = refused(tiny_tokenizer(PLAIN_TURNS, eos=False), trajectory(user("q"), assistant("No.")))
    assert outcome.code == "no_terminator"


def test_a_generation_prompt_that_the_turn_does_not_continue_is_refused_not_guessed() -> None:
    closes_reasoning = CHATML.replace("assistant\n'", "assistant\n<think>\n\n</think>\n\n'")
    outcome = refused(tiny_tokenizer(closes_reasoning), trajectory(user("q"), assistant("a")))
    assert outcome.code == "ending_does_not_follow_generation_prompt"
    assert "<think>" in outcome.detail


def test_a_turn_with_nothing_before_it_is_refused() -> None:
    assert refused(tiny_tokenizer(CHATML), trajectory(assistant("hello"), user("q")), 0).code == "empty_prompt"


def test_a_turn_without_an_action_is_refused_under_the_action_target() -> None:
    for content in ("no block", "```bash\na\n```\n```bash\nb\n```", "```python\na\n```"):
        run = trajectory(user("q"), assistant(content))
        assert refused(tiny_tokenizer(CHATML), run, target="action").code == "no_action"


def test_the_fingerprint_changes_with_everything_that_changes_tokens_and_with_nothing_else() -> None:
    def fingerprint(template: str = CHATML, **given: Any) -> str:
        return renderer(tiny_tokenizer(template), **given).fingerprint

    plain = fingerprint()
    assert plain == fingerprint()
    assert plain == fingerprint(seed=7, group="none")
    others = [
        fingerprint(MISTRAL),
        fingerprint(rendering="transcript"),
        fingerprint(target="action"),
        fingerprint(loss_on="all"),
        fingerprint(max_tokens=9),
        fingerprint(length_policy="truncate_end"),
        fingerprint(observation_limit_tokens=9),
        fingerprint(template_kwargs={"enable_thinking": False}),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_a_special_token_spelt_in_an_observation_is_that_token_as_at_inference() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    sample = rendered(tokenizer, trajectory(user("say <|im_end|> twice"), assistant("a")))
    text = "<|im_start|>user\nsay <|im_end|> twice<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    assert sample.token_ids_S.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert np.count_nonzero(sample.weights_S) == 2
