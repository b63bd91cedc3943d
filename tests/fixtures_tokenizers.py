"""Tokenizers for tests: the real Qwen3 one, and tiny ones trained here, with hand-written templates."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from traceforge.samples.tokenizer import load_tokenizer

DATA = Path(__file__).parent / "data"

_CORPUS = [
    "Yes, please look at the file again. No, that is not it. The tests pass now.",
    "I will run the command and then read the output of the tool before the next call.",
    'def show(value):\n    return {"city": value, "a": 1}\n',
    "USER: hello there\nASSISTANT: hello, what is the task? Yes. No.\n",
    "```bash\nls -la\n```\n",
] * 4

_MARKERS = [
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<start_of_turn>",
        "[INST]",
        "[/INST]",
        "<|user|>",
        "<|assistant|>",
        "<|call_end|>",
    ),
]
END_OF_TURN_ID = 106

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}"
    """{{ '<call>{"name": "' + c.function.name + '", "arguments": ' }}{{ ARGUMENTS }}{{ '}</call>' }}{% endfor %}"""
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TOOLS_OBJECT = CHATML_TOOLS.replace("ARGUMENTS", "c.function.arguments | tojson")
CHATML_TOOLS_TEXT = CHATML_TOOLS.replace("{{ ARGUMENTS }}{{ '", "{{ c.function.arguments + '")
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
PLAIN_TURNS = (
    "{% for m in messages %}{{ ('ASSISTANT: ' if m.role == 'assistant' else 'USER: ') + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
TERMINATOR_WITH_NEXT = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ ('' if loop.first else eos_token + '\n') + 'USER: ' + m.content }}"
    "{% else %}{{ '\nASSISTANT:' + ' ' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + '(' + c.function.arguments | tojson + ')<|call_end|>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nASSISTANT:' }}{% endif %}"
)
HEADERS_ONLY = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
EOS_AT_THE_END = (  # as Phi-3: the end-of-text token closes the conversation, `<|im_end|>` the turn
    CHATML.removesuffix("{% endif %}") + "{% else %}{{ eos_token }}{% endif %}"
)
CALLS_WITHOUT_TEXT = (  # as Llama 3.1: a turn with calls loses its text
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTENT_PARTS = (  # as the templates of vision models: content is a list of parts
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are Tiny, a helpful assistant.<|im_end|>\n' }}{% endif %}" + CHATML
)


def tiny_tokenizer(template: str | None, *, bos: bool = True, eos: bool = True) -> Any:
    """Return a byte-level BPE tokenizer of about 400 tokens; eos = pad = id 1, `<end_of_turn>` = id 106."""
    specials = ["<pad>", "</s>", "<s>", *_MARKERS]
    specials += [f"<unused{number}>" for number in range(END_OF_TURN_ID - len(specials))] + ["<end_of_turn>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(specials) + 256 + 200,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if bos:  # like Llama's: a plain call of the tokenizer puts a BOS in front
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    return _wrapped(tokenizer, template, bos=bos, eos=eos)


def sentencepiece_like_tokenizer(template: str, *, prepend: str) -> Any:
    """Return a BPE tokenizer with `▁` for spaces; `prepend`: "normalizer" (legacy Llama) or "first" (newer)."""
    specials = ["<pad>", "</s>", "<s>", *_MARKERS]
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=True, fuse_unk=False))
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    # Word by word: without a pre-tokenizer the merges would run over whole sentences.
    tokenizer.train_from_iterator([word for line in _CORPUS for word in line.split()], trainer)
    return _wrapped(tokenizer, template)


def word_tokenizer(template: str, words: Sequence[str]) -> Any:
    """Return a tokenizer with one id per word, in the order given, and `</s>` as both eos and pad."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(tokenizer, template, pad="</s>")


def _wrapped(
    tokenizer: Tokenizer, template: str | None, *, bos: bool = True, eos: bool = True, pad: str = "<pad>"
) -> Any:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if bos else None,
        eos_token="</s>" if eos else None,
        pad_token=pad,
    )
    wrapped.chat_template = template
    return wrapped


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Qwen3 tokenizer, unpacked once a test run."""
    source, folder = DATA / "tokenizers" / "qwen3", tmp_path_factory.mktemp("qwen3")
    with lzma.open(source / "tokenizer.json.xz") as packed, (folder / "tokenizer.json").open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    shutil.copy(source / "tokenizer_config.json", folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_tokenizer(qwen3_folder: Path) -> Any:
    """The Qwen3 tokenizer with its own chat template. Shared: a test that changes it copies it first."""
    return load_tokenizer(str(qwen3_folder))


@pytest.fixture(scope="session")
def make_tiny_tokenizer() -> Callable[..., Any]:
    """`tiny_tokenizer`, for tests that do not import this file."""
    return tiny_tokenizer
