"""Pairs named by id over ingested trajectories: of two runs, of two turns, or of a turn and a reply given in full.

    {"chosen": "a", "rejected": "b"}                       two runs; the prompt is their longest common run of messages
    {"chosen": "a#3", "rejected": "b#3"}                   two turns behind the same history, which is the prompt
    {"chosen": "a#3", "rejected": {"role": "assistant"…}}  a turn, and another reply to its history

A reply given in full is one message or a list of them, and may stand on either side. On the command line, `A|B` is the
first or second form. `task_id` may name the task of the pair; `note` is for people.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from traceforge.errors import closest
from traceforge.samples.pair_sides import PairRefused, PairSide, check_endings, common_prompt, same_messages
from traceforge.samples.trajectory_index import TrajectoryIndex
from traceforge.trajectories.readers.messages import pair_results, read_message
from traceforge.trajectories.record import Outcome
from traceforge.trajectories.refusals import Refused
from traceforge.trajectories.text import kind_of

SOURCE_FORMAT = "explicit-pair"
READ_KEYS = frozenset(("chosen", "rejected", "task_id", "instance_id", "note"))

_NUM_IDS_COMPARED = 2_000
_TURN_ID = re.compile(r"(?P<trajectory>.*)#(?P<turn>\d{1,9})", re.DOTALL)


def read_explicit_pair(row: dict[str, Any], index: TrajectoryIndex, *, name: str) -> tuple[PairSide, PairSide, int]:
    """Return both sides and how many messages are their prompt.

    Args:
        name: the id of the record that is made for a reply given in full.

    Raises:
        PairRefused: with the reason.
    """
    named = {key: _resolve(row[key], index) if isinstance(row[key], str) else None for key in ("chosen", "rejected")}
    chosen, rejected = named["chosen"], named["rejected"]
    if chosen is None and rejected is None:
        raise PairRefused("bad_pair", "neither side is the id of a trajectory or of a turn")
    if chosen is None or rejected is None:
        behind = chosen or rejected
        assert behind is not None
        given = "rejected" if rejected is None else "chosen"
        if behind.turn is None:
            raise PairRefused("bad_pair", f"{given} is given in full, so the other side must be a turn, as `ID#TURN`")
        prompt_messages = behind.stop - 1
        reply = _reply(row[given], given, behind, name)
        chosen, rejected = (behind, reply) if given == "rejected" else (reply, behind)
    else:
        prompt_messages = _prompt_of_named(chosen, rejected)
    if prompt_messages == 0:
        raise PairRefused("no_common_beginning", "the trajectory begins with this turn: there is no message to answer")
    check_endings(chosen.messages, rejected.messages, prompt_messages)
    return chosen, rejected, prompt_messages


def _prompt_of_named(chosen: PairSide, rejected: PairSide) -> int:
    if chosen.trajectory.tools != rejected.trajectory.tools:
        raise PairRefused("tools_differ", "the trajectories were given different tools")
    if (chosen.turn is None) != (rejected.turn is None):
        raise PairRefused("bad_pair", "one side is a turn and the other a whole trajectory")
    if chosen.turn is None:
        return common_prompt(chosen.messages, rejected.messages)
    histories = (chosen.messages[:-1], rejected.messages[:-1])
    if len(histories[0]) != len(histories[1]) or not all(map(same_messages, *histories)):
        raise PairRefused(
            "histories_differ",
            f"{len(histories[0])} messages stand before the chosen turn, {len(histories[1])} before the rejected one, "
            "and they are not the same",
        )
    return chosen.stop - 1


def _resolve(identifier: str, index: TrajectoryIndex) -> PairSide:
    if identifier in index:
        trajectory = index.get(identifier)
        return PairSide(trajectory, len(trajectory.messages), None)
    match = _TURN_ID.fullmatch(identifier)
    named = match["trajectory"] if match else identifier
    if match is None or named not in index:
        guess = closest(named, index) if len(index) <= _NUM_IDS_COMPARED else None
        meant = f"; did you mean {guess!r}?" if guess else ""
        raise PairRefused("unknown_trajectory", f"there is no trajectory {named[:200]!r}{meant}")
    trajectory, turn = index.get(named), int(match["turn"])
    turns = trajectory.turns()
    if turn >= len(turns):
        raise PairRefused("unknown_turn", f"{named!r} has {len(turns)} turns, and none is number {turn}")
    return PairSide(trajectory, turns[turn] + 1, turn)


def _reply(held: object, key: str, behind: PairSide, name: str) -> PairSide:
    """Return the side that a reply given in full makes behind the history of the other side's turn."""
    raws = [held] if isinstance(held, dict) else held
    if not isinstance(raws, list):
        raise PairRefused("bad_pair", f"{key} is {kind_of(held)}, not an id, a message or a list of messages")
    prompt = behind.messages[:-1]
    try:
        ending = [read_message(raw, place) for place, raw in enumerate(raws)]
        messages = tuple(pair_results([*prompt, *ending]))
    except Refused as refused:
        raise PairRefused(refused.reason, f"{key}: {refused.detail}") from refused
    except RecursionError as error:
        raise PairRefused("too_deeply_nested", "arrays and objects are nested too deeply") from error
    # What pairing adds to the history is left out: it must stay the other side's, to the letter.
    messages = (*prompt, *messages[len(prompt) :])
    record = msgspec.structs.replace(
        behind.trajectory,
        trajectory_id=name,
        source_format=SOURCE_FORMAT,
        messages=messages,
        model=None,
        exit_status=None,
        outcome=Outcome(),
    )
    return PairSide(record, len(messages), None, is_new=True)
