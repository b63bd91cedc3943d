"""What the command line prints: results as text or as one JSON document on stdout, errors in a few lines on stderr."""

from __future__ import annotations

import io
import json
import logging
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import typer

from traceforge.errors import TraceForgeError

if TYPE_CHECKING:
    from traceforge.training.run import RunOutcome


def prepare_terminal() -> None:
    """Let no character that a terminal cannot show end a run, and keep libraries' words to developers quiet."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # names a kernel that is not installed


def show_error(error: Exception, *, debug: bool) -> None:
    """Write an error to stderr: its message and way out, or with `debug` the traceback."""
    if debug:
        traceback.print_exception(error)
        return
    if isinstance(error, TraceForgeError):
        lines = [f"error: {error}", *getattr(error, "__notes__", [])]
    else:
        lines = [
            f"error: unexpected {type(error).__name__}: {error}",
            "  way out: run again with --debug and report it",
        ]
    sys.stderr.write("\n".join(lines) + "\n")


def show_failure(error: BaseException, *, debug: bool) -> int:
    """Write to stderr why a command ended and return its exit code."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        sys.stderr.write("interrupted\n")
        return 130
    if isinstance(error, BrokenPipeError):
        sys.stderr.close()
        return 0
    assert isinstance(error, Exception), "nothing else is caught"
    show_usage = getattr(error, "show", None)  # the parser's own errors know how to show themselves
    if callable(show_usage):
        show_usage()
        return int(getattr(error, "exit_code", 2))
    show_error(error, debug=debug)
    return error.exit_code if isinstance(error, TraceForgeError) else 1


def print_result(values: dict[str, Any], *, as_json: bool, text: str) -> None:
    """Write a result to stdout."""
    sys.stdout.write((json.dumps(values, ensure_ascii=False, indent=2) if as_json else text) + "\n")


def print_run(outcome: RunOutcome, *, as_json: bool) -> None:
    """Write to stdout what a run came to."""
    evidence = outcome.evidence
    values = {
        "folder": str(outcome.folder),
        "decision": evidence.decision,
        "reasons": list(evidence.decision_reasons),
        "baseline": evidence.baseline.model_dump(),
        "candidate": evidence.candidate.model_dump(),
        "report": str(outcome.report),
    }
    lines = [
        f"decision: {evidence.decision}",
        *(f"  {reason}" for reason in evidence.decision_reasons),
        f"evidence: {outcome.folder / 'evidence.json'}",
        f"report:   {outcome.report}",
    ]
    print_result(values, as_json=as_json, text="\n".join(lines))
