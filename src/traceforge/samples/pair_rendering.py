"""One pair to tokens: each side through the same renderer as SFT, one sequence a trained turn of its ending.

Prompt   Kept whole, the same on both sides. Tokens of it are never targets; those of a reply always are, also where
         both replies begin with the same ones.
Length   `data.max_tokens` bounds each sequence. A side is cut, or does not fit, by its own length alone, whatever its
         sibling's is. Observations are shortened by their own text, so alike on both sides.
Refused  `too_long` and the other codes of `refusal.py` if they hold for any sequence; `nothing_trained` if no trained
         token of a side is left within the limit; `identical_after_tokenising` if both sides came to the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from traceforge.config import DataSettings
from traceforge.errors import ConfigError
from traceforge.samples.branches import Pair
from traceforge.samples.lengths import CUT_AT_END
from traceforge.samples.pair_references import PairReference
from traceforge.samples.pair_sides import ending_turns
from traceforge.samples.refusal import Refusal
from traceforge.samples.render import TurnRenderer
from traceforge.samples.tokens import Sample
from traceforge.trajectories.record import Trajectory

TURNS_CUT_OFF = "turns_cut_off"
"""Turns of an ending lie behind `data.max_tokens` and are not trained; those before them are."""


def check_pair_settings(settings: DataSettings) -> None:
    """Refuse settings that a preference pair cannot honour.

    Raises:
        ConfigError: naming the setting and the way out.
    """
    if settings.loss_on == "all":
        raise ConfigError(
            'data.loss_on = "all" trains the context, and the score of a preference branch is that of its reply alone',
            hint='use data.loss_on = "target" with objective.method = "simpo" or "dpo"',
        )
    if settings.length_policy == "drop_oldest":
        raise ConfigError(
            'data.length_policy = "drop_oldest" drops by the length of each sample, so the two sides of a preference '
            "pair would answer different prompts",
            hint='use "shorten_observations", which shortens both sides alike, "refuse" or "truncate_end"',
        )


def render_pair(
    renderer: TurnRenderer, settings: DataSettings, reference: PairReference, sides: tuple[Trajectory, Trajectory]
) -> Pair | Refusal:
    """Return the pair as token sequences, or why there is none.

    Args:
        renderer: made with `settings`.
        settings: as checked by `check_pair_settings`.
        reference: which messages of the trajectories are the sides.
        sides: the trajectories, chosen first.

    Raises:
        TemplateError: the tokenizer has no template.
    """
    stops = (reference.chosen_messages, reference.rejected_messages)
    rendered: list[tuple[Sample, ...]] = []
    for name, trajectory, stop in zip(("chosen", "rejected"), sides, stops, strict=True):
        turns = ending_turns(trajectory.messages[:stop], reference.prompt_messages)
        made = _render_side(renderer, settings, reference, trajectory, turns)
        if isinstance(made, Refusal):
            return replace(made, detail=f"{name}: {made.detail}")
        rendered.append(made)
    chosen, rejected = rendered
    if _same_tokens(chosen, rejected):
        cut = any(CUT_AT_END in sample.cuts for sample in (*chosen, *rejected))
        why = f", cut at data.max_tokens = {settings.max_tokens}" if cut else ""
        return Refusal("identical_after_tokenising", f"both sides are the same tokens{why}")
    return Pair(
        pair_id=reference.pair_id,
        group_id=reference.group,
        task_id=reference.task_id,
        chosen=chosen,
        rejected=rejected,
        cuts=cuts_of((*chosen, *rejected)),
    )


def cuts_of(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return the reason codes of all sequences of a pair, each once, in order."""
    return tuple(dict.fromkeys(code for sample in samples for code in sample.cuts))


def _render_side(
    renderer: TurnRenderer,
    settings: DataSettings,
    reference: PairReference,
    trajectory: Trajectory,
    turns: Sequence[int],
) -> tuple[Sample, ...] | Refusal:
    samples: list[Sample] = []
    behind: Refusal | None = None
    for index in turns:
        made = renderer.render(trajectory, index, group_id=reference.group)
        if isinstance(made, Sample):
            samples.append(replace(made, task_id=reference.task_id))
        elif made.code == "nothing_trained" and settings.length_policy == "truncate_end":
            behind = behind or made
        else:
            return made
    if not samples:
        return behind or Refusal("nothing_trained", "no turn of this side is trained")
    if behind is not None:
        samples[-1] = replace(samples[-1], cuts=(*samples[-1].cuts, TURNS_CUT_OFF))
    return tuple(samples)


def _same_tokens(chosen: Sequence[Sample], rejected: Sequence[Sample]) -> bool:
    return len(chosen) == len(rejected) and all(
        np.array_equal(one.token_ids_S, other.token_ids_S) and np.array_equal(one.weights_S, other.weights_S)
        for one, other in zip(chosen, rejected, strict=True)
    )
