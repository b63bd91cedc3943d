"""Rendering: one turn of a trajectory to one tokenised sample. (API first; the body follows.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traceforge.config import DataSettings
from traceforge.samples.tokens import Sample
from traceforge.trajectories.record import Trajectory


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a turn gives no sample: a reason code to count by, and a sentence for a person."""

    code: str
    detail: str


class TurnRenderer:
    """Renders turns of trajectories to samples under one tokenizer and one set of data settings."""

    def __init__(self, tokenizer: Any, settings: DataSettings, *, template_kwargs: Mapping[str, Any] | None = None):
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Hash of everything that changes the tokens of a sample."""
        raise NotImplementedError

    def render(self, trajectory: Trajectory, message_index: int, *, group_id: str) -> Sample | Refusal:
        """Return the sample of the turn at `message_index`, or why there is none."""
        raise NotImplementedError

    def text(self, trajectory: Trajectory, message_index: int) -> tuple[str, str]:
        """Return prompt text and ending text of the turn, after the length policy, as the model sees them."""
        raise NotImplementedError


def default_system_prompt(tokenizer: Any) -> str | None:
    """Return the system text that the template adds to a conversation without one, or None."""
    raise NotImplementedError
