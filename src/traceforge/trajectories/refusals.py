"""Why something was not kept: one reason code per kind of fault, each with its way out.

A refusal is counted and listed in the ingest manifest; it never stops the files after it. Its place is a file and, for
a file of lines, the line (from 1); faults inside a trajectory name the message (from 0, as in the log).
"""

from __future__ import annotations

import msgspec

from traceforge.errors import InputError

WAYS_OUT = {
    "already_ingested": "pass the raw logs; what `traceforge ingest` wrote goes to `traceforge build` as it is",
    "bad_content": "content must be a string, null, or a list of text parts",
    "bad_flag": "`weight`, `loss` or `train` of a message must be 0, 1, true or false, and must agree",
    "bad_message": "every message must be an object with a role",
    "bad_tool_call": "every tool call needs a function name",
    "bad_tools": "`tools` must be a list of function schemas",
    "binary_file": "unpack archives first; only text files with JSON or JSON lines are read",
    "duplicate": "nothing to do: the first copy is kept",
    "empty_file": "delete the file, or look why the run wrote nothing",
    "image_content": "remove the image, or keep this trajectory out: only text is trained",
    "invalid_json": "repair the JSON at the place named",
    "no_assistant_turn": "nothing to learn from here: the agent never answered",
    "no_messages": "nothing to learn from here: the log holds no messages",
    "not_a_file": "only regular files are read",
    "not_utf8": "convert the file to UTF-8, for example `iconv -f CP1252 -t UTF-8 FILE`",
    "orphan_tool_result": "the call this result answers is missing or was answered before; repair the ids",
    "symlink_loop": "remove the link that points back to a folder above it",
    "too_deeply_nested": "JSON nested over about 900 levels is not read",
    "truncated_json": "the file ends too early: copy it again, or cut off the unfinished record",
    "unknown_format": "formats read: mini-swe-agent logs, chat rows with `messages`, and bare lists of messages",
    "unknown_role": "roles are system, developer, user, assistant, tool and function",
    "unreadable": "check the permissions and the disk",
    "unsupported_content": "only text, reasoning and function calls are read from messages",
}
"""Every reason code, with the way out."""


class Refusal(msgspec.Struct, frozen=True):
    """One thing that was not kept. `line` is None where the fault is the whole file's."""

    file: str
    line: int | None
    reason: str
    detail: str


class Refused(InputError):
    """A verdict raised while a file, line or trajectory is read; the ingest makes a `Refusal` of it and goes on.

    Args:
        reason: a key of `WAYS_OUT`.
        detail: a sentence for a person, without the file.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}", hint=WAYS_OUT[reason])
        self.reason = reason
        self.detail = detail
