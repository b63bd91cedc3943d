"""Which tokens are trained: numbers and texts by hand. A-numbers name kinds of fault seen in other trainers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.fixtures_tokenizers import (
    CHATML,
    CHATML_TOOLS_OBJECT,
    DEFAULT_SYSTEM,
    END_OF_TURN_ID,
    GEMMA,
    MISTRAL,
    PLAIN_TURNS,
    sentencepiece_like_tokenizer,
    tiny_tokenizer,
    word_tokenizer,
)
from tests.rendering_cases import (
    assistant,
    call,
    rendered,
    renderer,
    result,
    system,
    text_of,
    trained_parts,
    trajectory,
    user,
)

from traceforge.samples.render import default_system_prompt

TWO_CALLS = trajectory(
    user("look"),
    assistant("I look.", call("read", '{"a": 1}', "c1"), call("list", '{"b": "x"}', "c2")),
    result("one", "c1"),
    result("two", "c2"),
    assistant("Done."),
)


def test_a_sample_of_eight_words_trains_the_three_of_its_answer_where_pad_is_eos() -> None:
    # A6: prompt 1, 11, 12; answer 21, 22, 2; the end token has the id of the padding token and is trained all the same.
    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, 30))]
    template = (
        "{{ '<s> ' }}{% for m in messages %}{{ m.content + (' </s>' if m.role == 'assistant' else ' ') }}{% endfor %}"
    )
    tokenizer = word_tokenizer(template, words)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    sample = rendered(tokenizer, trajectory(user("w11 w12"), assistant("w21 w22")))
    assert sample.token_ids_S.tolist() == [1, 11, 12, 21, 22, 2]
    assert sample.weights_S.tolist() == [0, 0, 0, 1, 1, 1]
    assert sample.num_trained_tokens == 3


def test_prompt_length_is_counted_in_tokens_whatever_the_template_call_returns() -> None:
    # A1: 20 prompt tokens and 5 of the answer give 5 trained tokens, not 23.
    words = ["<unk>", "</s>", *(f"w{number}" for number in range(2, 40))]
    template = "{% for m in messages %}{{ m.content + (' </s>' if m.role == 'assistant' else ' ') }}{% endfor %}"
    question, answer = (" ".join(f"w{number}" for number in span) for span in (range(2, 22), range(22, 26)))
    sample = rendered(word_tokenizer(template, words), trajectory(user(question), assistant(answer)))
    assert (sample.num_tokens, sample.num_trained_tokens) == (25, 5)
    assert sample.weights_S.tolist() == [0] * 20 + [1] * 5


def test_only_the_turn_and_its_terminator_are_trained_and_the_newline_behind_is_not() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    sample = rendered(tokenizer, trajectory(system("s"), user("a"), assistant("b"), user("c"), assistant("Yes. No.")))
    assert trained_parts(tokenizer, sample) == ["Yes. No.<|im_end|>"]
    assert text_of(tokenizer, sample).endswith("<|im_start|>assistant\nYes. No.<|im_end|>\n")
    assert sample.weights_S[-1] == 0.0
    assert sample.cuts == ()


def test_every_turn_is_trained_in_its_own_sample() -> None:
    # A23: three assistant turns, three trained spans; null content never becomes the word None.
    tokenizer = tiny_tokenizer(CHATML_TOOLS_OBJECT)
    run = trajectory(
        user("q"), assistant("one"), user("q"), assistant("two"), user("q"), assistant("", call("f", "{}"))
    )
    samples = [rendered(tokenizer, run, index) for index in run.turns()]
    assert [sample.sample_id for sample in samples] == ["run#0", "run#1", "run#2"]
    assert [trained_parts(tokenizer, sample) for sample in samples] == [
        ["one<|im_end|>"],
        ["two<|im_end|>"],
        ['<call>{"name": "f", "arguments": {}}</call><|im_end|>'],
    ]
    assert all("None" not in text_of(tokenizer, sample) for sample in samples)


def test_a_merge_across_the_border_keeps_the_first_token_of_the_answer() -> None:
    # A3: the prompt ends in a space that would merge with "Yes"; at inference that space is a token already.
    tokenizer = tiny_tokenizer(PLAIN_TURNS)
    joint = tokenizer("USER: hello\nASSISTANT: Yes", add_special_tokens=False)["input_ids"]
    prompt = tokenizer("USER: hello\nASSISTANT: ", add_special_tokens=False)["input_ids"]
    assert joint[: len(prompt)] != prompt, "the case must show the merge"
    sample = rendered(tokenizer, trajectory(user("hello"), assistant("Yes")))
    assert sample.token_ids_S[: len(prompt)].tolist() == prompt
    assert sample.weights_S[: len(prompt)].sum() == 0
    assert trained_parts(tokenizer, sample) == ["Yes\n</s>"]
    assert "border_merge" in sample.cuts


@pytest.mark.parametrize("prepend", ["first", "normalizer"])
def test_an_ending_tokenised_apart_gains_no_space(prepend: str) -> None:
    # A3: SentencePiece-like tokenizers put a space before the first word of a text; an ending is not the first.
    tokenizer = sentencepiece_like_tokenizer(PLAIN_TURNS, prepend=prepend)
    sample = rendered(tokenizer, trajectory(user("hello"), assistant("Yes")))
    assert "border_merge" in sample.cuts
    assert text_of(tokenizer, sample).strip() == "USER: hello\nASSISTANT: Yes\n</s>"
    ending = sample.token_ids_S[np.flatnonzero(sample.weights_S)].tolist()
    assert tokenizer.convert_ids_to_tokens(ending)[0].startswith("Y")


@pytest.mark.parametrize("prepend", ["first", "normalizer"])
def test_remembered_parts_give_the_ids_of_the_whole_text_with_metaspace(prepend: str) -> None:
    tokenizer = sentencepiece_like_tokenizer(MISTRAL, prepend=prepend)
    run = trajectory(user("look at the file"), assistant(" Yes, it is."), user("again"), assistant("No"))
    sample = rendered(tokenizer, run)
    text = "<s>[INST] look at the file [/INST]  Yes, it is.</s>[INST] again [/INST] No</s>"
    assert sample.token_ids_S.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert sample.token_ids_S[np.flatnonzero(sample.weights_S)][-1] == tokenizer.eos_token_id


def test_a_bos_in_the_template_stands_once_at_index_0() -> None:
    # A4: the text already has it, the tokenizer must not add another, and the ending has none.
    tokenizer = tiny_tokenizer(MISTRAL)
    assert tokenizer("hello")["input_ids"][0] == tokenizer.bos_token_id, "the case must show a tokenizer that adds one"
    sample = rendered(tokenizer, trajectory(user("hello"), assistant("Yes"), user("again"), assistant("No")))
    assert np.flatnonzero(sample.token_ids_S == tokenizer.bos_token_id).tolist() == [0]
    assert sample.weights_S[0] == 0.0


def test_a_template_without_bos_gets_none_as_at_inference() -> None:
    # A4/A5: with a BOS token that the template does not write, and without any, the ids are the same.
    run = trajectory(user("hello"), assistant("Yes"))
    with_bos, without = tiny_tokenizer(CHATML), tiny_tokenizer(CHATML, bos=False)
    assert without.bos_token is None
    ids = rendered(without, run).token_ids_S
    assert ids.dtype == np.int64
    assert ids.tolist() == rendered(with_bos, run).token_ids_S.tolist()
    assert with_bos.bos_token_id not in ids


def test_the_last_trained_token_is_the_turns_terminator_and_not_the_tokenizers_eos() -> None:
    # A7: turns end with id 106, eos is id 1.
    tokenizer = tiny_tokenizer(GEMMA)
    assert tokenizer.eos_token_id == 1
    run = trajectory(user("a"), assistant("b"), user("c"), assistant("d"))
    for index in run.turns():
        sample = rendered(tokenizer, run, index)
        assert sample.token_ids_S[np.flatnonzero(sample.weights_S)][-1] == END_OF_TURN_ID
        assert 1 not in sample.token_ids_S


@pytest.mark.parametrize("newline", ["", "\n", "\n\n"])
def test_the_mask_does_not_depend_on_how_a_marker_tokenises_in_context(newline: str) -> None:
    # A10: with or without a newline before the header, the same ending is trained.
    template = CHATML.replace("'<|im_start|>", f"{newline!r} + '<|im_start|>")
    tokenizer = tiny_tokenizer(template)
    sample = rendered(tokenizer, trajectory(user("a"), assistant("Yes. No.")))
    assert trained_parts(tokenizer, sample) == ["Yes. No.<|im_end|>"]


def test_a_template_without_generation_markers_trains_neither_nothing_nor_everything() -> None:
    # A11
    tokenizer = tiny_tokenizer(CHATML)
    assert "generation %}" not in tokenizer.chat_template
    sample = rendered(tokenizer, trajectory(user("a"), assistant("Yes. No.")))
    assert 0 < sample.num_trained_tokens < sample.num_tokens


def test_tokens_of_the_generation_prompt_are_never_trained_even_a_think_pair() -> None:
    # A14: the generation prompt writes an empty think pair, and so does the template in the turn.
    pair = "<think>\n\n</think>\n\n"
    template = CHATML.replace("m.content +", f"('{pair}' if m.role == 'assistant' else '') + m.content +").replace(
        "assistant\n'", f"assistant\n{pair}'"
    )
    tokenizer = tiny_tokenizer(template)
    for loss_on in ("target", "all"):
        sample = rendered(tokenizer, trajectory(user("a"), assistant("Yes.")), loss_on=loss_on)
        assert trained_parts(tokenizer, sample)[-1].startswith("Yes.<|im_end|>")
        assert "<think>" in text_of(tokenizer, sample)
        assert not any("<think>" in part for part in trained_parts(tokenizer, sample))


def test_text_and_two_calls_of_one_turn_are_trained_in_order_and_their_results_are_not() -> None:
    # A21
    tokenizer = tiny_tokenizer(CHATML_TOOLS_OBJECT)
    first = rendered(tokenizer, TWO_CALLS, 1)
    assert trained_parts(tokenizer, first) == [
        'I look.\n<call>{"name": "read", "arguments": {"a": 1}}</call>'
        '\n<call>{"name": "list", "arguments": {"b": "x"}}</call><|im_end|>'
    ]
    last = rendered(tokenizer, TWO_CALLS, 4)
    assert trained_parts(tokenizer, last) == ["Done.<|im_end|>"]
    assert "<|im_start|>tool\none<|im_end|>" in text_of(tokenizer, last)


def test_the_action_target_trains_the_calls_and_the_terminator_but_not_the_text_before() -> None:
    tokenizer = tiny_tokenizer(CHATML_TOOLS_OBJECT)
    sample = rendered(tokenizer, TWO_CALLS, 1, target="action")
    assert trained_parts(tokenizer, sample) == [
        '\n<call>{"name": "read", "arguments": {"a": 1}}</call>'
        '\n<call>{"name": "list", "arguments": {"b": "x"}}</call><|im_end|>'
    ]


def test_the_action_target_of_a_text_scaffold_trains_the_fenced_command_through_the_terminator() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    turn = "I use `ls`.\n\n```bash\nls -la\n```"
    sample = rendered(tokenizer, trajectory(user("a"), assistant(turn)), target="action")
    assert trained_parts(tokenizer, sample) == ["```bash\nls -la\n```<|im_end|>"]


def test_loss_on_all_trains_all_but_the_first_token_and_the_generation_prompt() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    sample = rendered(tokenizer, trajectory(system("s"), user("a"), assistant("Yes.")), loss_on="all")
    before, after = trained_parts(tokenizer, sample)
    assert before == "system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n"  # index 0 is the first <|im_start|>
    assert after == "Yes.<|im_end|>\n"


def test_a_turn_flagged_untrained_is_left_out_of_the_context_loss_and_others_are_unchanged() -> None:
    # A20: a tool-call turn and a user message marked "do not train", under loss on all tokens.
    tokenizer = tiny_tokenizer(CHATML_TOOLS_OBJECT)

    def run(flag: bool | None) -> Any:
        return trajectory(
            user("first"),
            assistant("I look.", call("read", '{"a": 1}', "c1"), trained=flag),
            result("one", "c1"),
            user("no no", trained=flag),
            assistant("Done."),
        )

    free, flagged = (rendered(tokenizer, run(flag), loss_on="all") for flag in (None, False))
    assert free.token_ids_S.tolist() == flagged.token_ids_S.tolist()
    left_out = np.flatnonzero(free.weights_S - flagged.weights_S)
    texts = tokenizer.decode(flagged.token_ids_S[left_out].tolist())
    assert texts == 'I look.\n<call>{"name": "read", "arguments": {"a": 1}}</call><|im_end|>no no'
    assert trained_parts(tokenizer, flagged)[-1] == "Done.<|im_end|>\n"


def test_a_flagged_call_is_left_out_under_a_template_that_wants_every_result_called_for() -> None:
    # A20, as gpt-oss: a tool result without a call before it raises.
    demand = "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    template = demand + "{{ raise_exception('no call') }}{% endif %}{% endfor %}" + CHATML_TOOLS_OBJECT
    tokenizer = tiny_tokenizer(template)
    turn = assistant("I look.", call("read", '{"a": 1}', "c1"), trained=False)
    sample = rendered(tokenizer, trajectory(user("q"), turn, result("one", "c1"), assistant("Done.")), loss_on="all")
    parts = trained_parts(tokenizer, sample)
    assert not any(word in part for part in parts for word in ("look", "read"))
    assert any("one<|im_end|>" in part for part in parts)


def test_the_action_target_works_for_a_template_that_wants_text_or_calls_in_every_turn() -> None:
    demand = (
        "{% for m in messages %}{% if not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}"
    )
    tokenizer = tiny_tokenizer(demand + "{% endfor %}" + CHATML_TOOLS_OBJECT)
    sample = rendered(tokenizer, trajectory(user("q"), assistant("", call("read", "{}"))), target="action")
    assert trained_parts(tokenizer, sample) == ['<call>{"name": "read", "arguments": {}}</call><|im_end|>']


def test_a_template_that_adds_a_system_prompt_is_found_out() -> None:
    # A25
    assert default_system_prompt(tiny_tokenizer(DEFAULT_SYSTEM)) == "You are Tiny, a helpful assistant."
    for template in (CHATML, MISTRAL, GEMMA, PLAIN_TURNS, None):
        assert default_system_prompt(tiny_tokenizer(template)) is None
    sample = rendered(tiny_tokenizer(DEFAULT_SYSTEM), trajectory(system("Mine, kept."), user("a"), assistant("b")))
    assert text_of(tiny_tokenizer(DEFAULT_SYSTEM), sample).count("Mine, kept.") == 1
    assert "Tiny" not in text_of(tiny_tokenizer(DEFAULT_SYSTEM), sample)


def test_text_shows_prompt_and_ending_as_the_model_sees_them() -> None:
    run = trajectory(user("a"), assistant("Yes."))
    prompt, ending = renderer(tiny_tokenizer(CHATML)).text(run, 1)
    assert prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert ending == "Yes.<|im_end|>\n"
