"""Text to token ids with character offsets, the way inference tokenises a rendered conversation.

Special  No token is added to the text (`add_special_tokens = False`), as inference engines do behind a chat template:
tokens   a BOS is there if the template wrote one, once, and is not if it did not. Text that spells a special token
         becomes that token, in observations too, because it does at inference.
Speed    A tokenizer cuts its text at special tokens before anything else, so what stands between two of them is
         tokenised alone. The encoder does the same and remembers the parts: the turns of a trajectory repeat their
         history, and each part of it is tokenised once. This holds only for tokenizers that pass a comparison with
         the whole text when the encoder is made; the others are given the whole text each time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from traceforge.samples.tokens import IntArray

_REMEMBERED_CHARS = 16_000_000


class Encoding(NamedTuple):
    """Token ids with the character range `[starts, stops)` of each; tokens that split a character share its range."""

    ids: IntArray
    starts: IntArray
    stops: IntArray


class TextEncoder:
    """Encodes and decodes with one fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = list(tokenizer.added_tokens_decoder.values())
        self.special_texts: tuple[str, ...] = tuple(
            sorted(
                {str(token) for token in added if token.special} | {str(text) for text in tokenizer.all_special_tokens},
                key=lambda text: (-len(text), text),
            )
        )
        """Texts of the special tokens, longest first."""
        # Longest first, so that the alternation finds what the tokenizer finds: the leftmost, longest match.
        matched = sorted({str(t) for t in added if not t.normalized and not t.single_word}, key=len, reverse=True)
        self._matched = re.compile("|".join(re.escape(text) for text in matched if text)) if matched else None
        self._borders = {str(t) for t in added if t.special and not (t.normalized or t.single_word or t.lstrip)}
        self._remembered: dict[str, Encoding] = {}
        self._remembered_chars = 0
        self.splits_at_special_tokens = bool(self._borders) and self._agrees_with_whole_texts()

    def encode(self, text: str) -> Encoding:
        """Return the tokens of `text` as one joint tokenisation gives them."""
        if not self.splits_at_special_tokens:
            return self.encode_whole([text])[0]
        return self._encode_parts(text)

    def encode_whole(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the tokens of each text, in one call of the tokenizer and without remembering anything."""
        encoded = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [
            _encoding(ids, offsets)
            for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def encode_ending(self, ending: str) -> Iterator[Encoding]:
        """Yield the ways to tokenise `ending` apart from its prompt, the likeliest first; the caller checks each.

        Some tokenizers put a space before the first word of a text, or of each part between special tokens. The later
        ways set something before the ending and take its tokens off again, so that the ending begins neither.
        """
        for anchor in ("", *sorted(self._borders, key=len)[:1], "\n"):
            found = self.encode_whole([anchor + ending])[0]
            first = int(np.searchsorted(found.stops, len(anchor), side="right")) if anchor else 0
            yield Encoding(found.ids[first:], found.starts[first:] - len(anchor), found.stops[first:] - len(anchor))

    def decode(self, token_ids: IntArray) -> str:
        """Return the text of the tokens, special tokens included, nothing tidied."""
        text: str = self._tokenizer.decode(
            token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def final_special(self, text: str) -> tuple[int, int] | None:
        """Return the range of the special token that `text` ends with, white space after it aside, or None."""
        body = text.rstrip()
        for special in self.special_texts:
            # A special token may itself end in white space, which rstrip has taken off.
            if special and text.endswith(special):
                return len(text) - len(special), len(text)
            if special and body.endswith(special):
                return len(body) - len(special), len(body)
        return None

    def _encode_parts(self, text: str) -> Encoding:
        parts = self._parts(text)
        unknown = [part for part in dict.fromkeys(parts) if part not in self._remembered]
        if unknown:
            size = sum(len(part) for part in unknown)
            if self._remembered_chars + size > _REMEMBERED_CHARS:
                self._remembered.clear()
                self._remembered_chars = 0
                unknown = list(dict.fromkeys(parts))
                size = sum(len(part) for part in unknown)
            self._remembered.update(zip(unknown, self.encode_whole(unknown), strict=True))
            self._remembered_chars += size
        encodings = [self._remembered[part] for part in parts]
        if not encodings:
            return _encoding([], [])
        counts = np.array([encoding.ids.shape[0] for encoding in encodings])
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        shifts = np.repeat(np.cumsum(lengths) - lengths, counts)
        return Encoding(
            np.concatenate([encoding.ids for encoding in encodings]),
            np.concatenate([encoding.starts for encoding in encodings]) + shifts,
            np.concatenate([encoding.stops for encoding in encodings]) + shifts,
        )

    def _parts(self, text: str) -> list[str]:
        """Cut before each special token, so that a part is such a token with the text that follows it."""
        assert self._matched is not None
        cuts = [found.start() for found in self._matched.finditer(text) if found.group() in self._borders]
        edges = [0, *cuts, len(text)]
        return [text[start:stop] for start, stop in itertools.pairwise(edges) if start < stop]

    def _agrees_with_whole_texts(self) -> bool:
        named = [str(token) for token in self._tokenizer.all_special_tokens if str(token) in self._borders]
        for special in [*named, *sorted(self._borders)][:16]:
            text = special.join(["Aé b", "\n  x", " y.", "", "zé\n", "\n", "end", " "])
            whole, parts = self.encode_whole([text])[0], self._encode_parts(text)
            if not all(np.array_equal(one, other) for one, other in zip(whole, parts, strict=True)):
                return False
        return True


def _encoding(ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> Encoding:
    ranges = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    return Encoding(np.array(ids, dtype=np.int64), ranges[:, 0], ranges[:, 1])
