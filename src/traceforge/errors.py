"""The one error tree. Each class fixes an exit code; each message names the file, field or row and the way out.

Errors are for what a user, a file or a machine did. Our own mistakes are `assert`s.

Exit codes (also in CONTRACTS and `traceforge --help`): 0 done, 1 a named failure, 2 wrong usage, config or input,
3 does not fit or does not agree, 130/143 interrupted with the work saved.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TraceForgeError(Exception):
    """A named failure. `hint` is the way out, shown on its own line."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  way out: {self.hint}"


class UsageError(TraceForgeError, ValueError):
    """The command line, a setting or an input file is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, misspelt, out of range, or cannot be honoured beside another one."""


class InputError(UsageError):
    """A file or row cannot be read as what it should be; the message names the file and the line or row."""


class TemplateError(UsageError):
    """A chat template failed or cannot express a message."""


class ModelError(UsageError):
    """A model, tokenizer or adapter cannot be found, or is not what the run file says."""


class HubError(TraceForgeError, OSError):
    """A hub id could not be resolved or downloaded."""


class DoesNotFitError(TraceForgeError, RuntimeError):
    """A plan says that a run needs more memory than the machine has."""

    exit_code = 3


class MachineError(TraceForgeError, RuntimeError):
    """This machine cannot carry out a run: a product of matrices is refused or wrong, or the disk is full."""


class StorageError(TraceForgeError, OSError):
    """Writing failed: the disk is full or the folder is not writable. Nothing half-written is left in place."""


class TrainingError(TraceForgeError, RuntimeError):
    """Training cannot go on: nothing is trained, or too many updates in a row were not finite."""


class EvaluationError(TraceForgeError, RuntimeError):
    """An evaluation set has no trained token, or its loss cannot be formed."""


class HostMemoryError(TraceForgeError, MemoryError):
    """Host memory that a technique needs cannot be had: over its budget, or the system refuses to give or lock it."""


class RankError(TraceForgeError, RuntimeError):
    """A rank could not be started, could not meet the others, or ended; the message names it."""


class RankLostError(RankError):
    """This rank is well, but another one ended or did not take part in an exchange: a consequence, not a cause."""


class DisagreementError(TraceForgeError, RuntimeError):
    """Two ways of computing the same thing differ, or a gate did not hold."""

    exit_code = 3


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate a misspelt `word` most likely meant, or None."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None
