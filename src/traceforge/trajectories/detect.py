"""What a JSON value is, by its content: a record of a known format, a file that goes with logs, or nothing known.

Order    The readers are asked in order; the first that matches reads. File names never matter.
Beside   Labels, predictions and our own output often lie beside trajectories; they are named, not refused as unknown.
"""

from __future__ import annotations

from typing import Any, Literal

from traceforge.trajectories.outcomes import labels_in
from traceforge.trajectories.readers import chat, mini_swe_agent
from traceforge.trajectories.readers.reader import Reader

READERS: tuple[Reader, ...] = (mini_swe_agent.READER, chat.READER)
"""Every format, in the order they are asked."""

SideFile = Literal["swe-bench-labels", "swe-bench-predictions", "traceforge-output"]

_NUM_ITEMS_LOOKED_AT = 20
_PREDICTION_KEYS = frozenset(("instance_id", "model_patch", "model_name_or_path"))


def recognise(value: Any) -> Reader | SideFile | None:
    """Return the reader for a JSON value, the kind of side file it is, or None.

    A list of records is recognised as its first known item is; see `records_in`.
    """
    if isinstance(value, dict) and _is_own_output(value):
        return "traceforge-output"
    for reader in READERS:
        if reader.matches(value):
            return reader
    if isinstance(value, dict):
        if labels_in(value, "") is not None:
            return "swe-bench-labels"
        return "swe-bench-predictions" if _is_predictions(value) else None
    if isinstance(value, list):
        for item in value[:_NUM_ITEMS_LOOKED_AT]:
            known = recognise(item) if isinstance(item, dict) else None
            if known is not None:
                return known
    return None


def records_in(value: Any) -> list[Any] | None:
    """Return the items of a list of records, or None for a value that is one record itself."""
    if isinstance(value, list) and not any(reader.matches(value) for reader in READERS):
        return value
    return None


def _is_own_output(value: dict[str, Any]) -> bool:
    return str(value.get("schema_version", "")).startswith(("traceforge-trajectory/", "traceforge-ingest/"))


def _is_predictions(value: dict[str, Any]) -> bool:
    return _is_prediction(value) or (bool(value) and all(_is_prediction(each) for each in value.values()))


def _is_prediction(value: Any) -> bool:
    # Nothing else may be in it: rollouts hold their patch under the same name, beside the conversation.
    return isinstance(value, dict) and "model_patch" in value and value.keys() <= _PREDICTION_KEYS
