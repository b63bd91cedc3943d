"""Synthetic preference pairs of a chosen length, for trials of speed and memory: random words, marked as such.

Text     Chosen replies draw their words from one list, rejected ones from another, so a preference can be learned. The
         same seed gives the same text.
Lengths  Without a model a word counts as a token, which most vocabularies of English make true, and what a chat
         template adds comes on top. With a tokenizer the counts are exact: what stands before the first trained token
         is the prompt, the trained tokens are the reply. What a template writes behind a turn comes after both.
Marked   The prompt says what it is, ids begin with `synthetic-`, and manifest and statistics name the source
         `synthetic_pairs`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traceforge.config import DataSettings
from traceforge.errors import InputError
from traceforge.samples.build import check_output
from traceforge.samples.pair_build import PairBuildSummary, write_pairs
from traceforge.samples.pair_references import COMMAND, PAIR_SCHEMA
from traceforge.samples.pair_sides import PairSide
from traceforge.samples.pair_sources import PairDraft
from traceforge.samples.refusal import Refusal
from traceforge.samples.render import TurnRenderer
from traceforge.trajectories.record import Message, Trajectory

SOURCE_FORMAT = "synthetic"
LEAST_PROMPT_TOKENS = 16

# Words of English that are one token, with the space before them, in most vocabularies.
_PROMPT_WORDS = (
    "the of and to in is that for it was on are as with at be this have from or one had by word but not what all were "
    "we when your can said there use an each which she do how their if will up other about out many then them these "
    "so some her would make like him into time has look two more"
)
_CHOSEN_WORDS = "water sound light house place year work part name line right great old good new long"
_REJECTED_WORDS = "never under last left night hard start might seem next open both below far off why"
_TRIES = 6


def build_synthetic_pairs(
    output: Path,
    *,
    pairs: int,
    prompt_tokens: int,
    reply_tokens: int,
    seed: int = 0,
    tokenizer: Any = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> PairBuildSummary:
    """Write a data set of synthetic pairs, and return its counts.

    Args:
        output: the folder to write; an earlier build of pairs there is replaced.
        pairs: how many.
        prompt_tokens: length of each prompt.
        reply_tokens: length of each reply, with the token that ends the turn.
        seed: decides the words.
        tokenizer: makes the lengths exact for this tokenizer and its chat template.
        template_kwargs: switches of the chat template.

    Raises:
        InputError: a length is too small, or cannot be had exactly with this tokenizer; the output is not a place for
            a build.
        StorageError: writing failed; nothing half-written is left.
    """
    if pairs < 1 or prompt_tokens < LEAST_PROMPT_TOKENS or reply_tokens < 2:
        raise InputError(
            f"{pairs} synthetic pairs with prompts of {prompt_tokens} and replies of {reply_tokens} tokens",
            hint=f"at least 1 pair, {LEAST_PROMPT_TOKENS} tokens of prompt and 2 of reply",
        )
    check_output(output, source=None, schema=PAIR_SCHEMA, command=COMMAND)
    maker = _Maker(seed, prompt_tokens, reply_tokens, tokenizer, dict(template_kwargs or {}))
    settings = {
        "synthetic": True,
        "pairs": pairs,
        "prompt_tokens": prompt_tokens,
        "reply_tokens": reply_tokens,
        "lengths": "words" if tokenizer is None else "exact",
        "seed": seed,
        "as_trl": False,
    }
    return write_pairs(maker.drafts(pairs), output, settings=settings, inputs=[], notes=Counter())


class _Maker:
    """Makes pairs, and remembers how many words gave the lengths wanted."""

    def __init__(
        self, seed: int, prompt_tokens: int, reply_tokens: int, tokenizer: Any, template_kwargs: Mapping[str, Any]
    ) -> None:
        self._seed = seed
        self._wanted = (prompt_tokens, reply_tokens, reply_tokens)
        self._lists = [words.split() for words in (_PROMPT_WORDS, _CHOSEN_WORDS, _REJECTED_WORDS)]
        self._renderer: TurnRenderer | None = None
        self._words = list(self._wanted)
        if tokenizer is not None:
            settings = DataSettings.model_validate(
                {"train": "synthetic", "max_tokens": 1 << 40, "length_policy": "refuse"}
            )
            self._renderer = TurnRenderer(tokenizer, settings, template_kwargs=template_kwargs)
            self._lists = [[each for each in words if _is_one_token(tokenizer, each)] or words for words in self._lists]

    def drafts(self, pairs: int) -> Iterator[PairDraft]:
        """Yield the pairs in order."""
        for number in range(pairs):
            chosen, rejected = self._sized(number)
            yield PairDraft(
                place=f"synthetic pair {number}",
                chosen=PairSide(chosen, len(chosen.messages), is_new=True),
                rejected=PairSide(rejected, len(rejected.messages), is_new=True),
                prompt_messages=1,
                group=None,
                tasks=(chosen.task_id,),
                states_tasks=True,
            )

    def _sized(self, number: int) -> tuple[Trajectory, Trajectory]:
        """Return both sides at the lengths wanted.

        Raises:
            InputError: no number of words gives them.
        """
        sides = self._sides(number)
        if self._renderer is None:
            return sides
        found = self._measure(sides)
        for _ in range(_TRIES):
            if found == self._wanted:
                return sides
            changes = (wanted - have for wanted, have in zip(self._wanted, found, strict=True))
            self._words = [max(0, words + change) for words, change in zip(self._words, changes, strict=True)]
            sides = self._sides(number)
            found = self._measure(sides)
        if found == self._wanted:
            return sides
        raise InputError(
            f"prompts of {self._wanted[0]} and replies of {self._wanted[1]} tokens cannot be had exactly with this "
            f"tokenizer; the nearest found are {found[0]}, {found[1]} and {found[2]}",
            hint="choose longer ones (the chat template alone takes some), or leave the model out",
        )

    def _sides(self, number: int) -> tuple[Trajectory, Trajectory]:
        name = f"synthetic-{self._seed}-{number:05d}"
        marker = f"Synthetic pair {number} (random words for a trial)"
        counts = list(self._words)
        if self._renderer is None:
            counts[0] -= len(marker.split())
        texts = []
        for part, (words, count) in enumerate(zip(self._lists, counts, strict=True)):
            rng = random.Random(f"{self._seed}:{number}:{part}")  # noqa: S311 - words, not secrets
            texts.append(" ".join(rng.choice(words) for _ in range(count)))
        prompt = Message(role="user", content=f"{marker} {texts[0]}".strip())
        chosen, rejected = (
            Trajectory(
                trajectory_id=f"{name}.{side}",
                task_id=name,
                source_format=SOURCE_FORMAT,
                source_file=SOURCE_FORMAT,
                messages=(prompt, Message(role="assistant", content=text)),
            )
            for side, text in (("chosen", texts[1]), ("rejected", texts[2]))
        )
        return chosen, rejected

    def _measure(self, sides: tuple[Trajectory, Trajectory]) -> tuple[int, int, int]:
        assert self._renderer is not None
        found = []
        for side in sides:
            made = self._renderer.render(side, 1, group_id=side.task_id)
            if isinstance(made, Refusal):
                raise InputError(f"a synthetic pair cannot be rendered: {made.code}: {made.detail}")
            found.append((made.num_tokens, made.num_trained_tokens, int(made.weights_S.nonzero()[0][0])))
        return found[0][2], found[0][1], found[1][1]


def _is_one_token(tokenizer: Any, word: str) -> bool:
    return len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1
