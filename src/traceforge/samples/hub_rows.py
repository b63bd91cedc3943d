"""Rows of a hub data set: its revision resolved to a commit first, then loaded at that commit.

Network  Only for a source that is a hub id, never on import. A 40-digit commit given as `data.revision` needs no
         resolving, so a data set that is in the local cache loads offline.
Columns  Arrow stores the union of all rows' keys and fills the rest with null; null keys are taken out again, so a
         tool schema has only the keys it was declared with.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from traceforge.errors import HubError
from traceforge.samples.row_files import RowFile, checked_rows

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(source: str) -> bool:
    """Return whether `source`, which is no local path, has the form `owner/name` and is no file name."""
    return _HUB_ID.fullmatch(source) is not None and not source.endswith((".json", ".jsonl"))


def resolve_commit(dataset_id: str, revision: str | None) -> str:
    """Return the commit that `revision` (None: the default branch) of a hub data set means now.

    Raises:
        HubError: the hub does not know it or cannot be reached.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    try:
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(dataset_id, revision=revision).sha
    except Exception as error:  # the client raises its own tree, the HTTP library's, and OSError
        raise _explain(dataset_id, revision, error) from error
    if commit is None:
        raise HubError(f"{dataset_id}: the hub names no commit for revision {revision or 'default'!r}")
    return commit


def load_hub_rows(dataset_id: str, commit: str) -> RowFile:
    """Return the rows of the `train` split of a hub data set at one commit.

    Raises:
        HubError: `datasets` is not installed, or the data set or its `train` split cannot be loaded.
        InputError: its rows are of no known form.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise HubError(
            f"{dataset_id}: reading a hub data set needs the package `datasets`, which is not installed",
            hint="pip install 'traceforge-train[hub]', or save the rows as .jsonl and pass the file",
        ) from error
    try:
        loaded: list[Any] = list(load_dataset(dataset_id, revision=commit, split="train"))
    except Exception as error:
        raise _explain(dataset_id, commit, error) from error
    rows = [_without_nulls(row) for row in loaded]
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return checked_rows(dataset_id, dataset_id, rows, content_hash=digest.hexdigest())


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _explain(dataset_id: str, revision: str | None, error: Exception) -> HubError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return HubError(
        f"{dataset_id}: no such file or folder here, and as a hub data set (revision {revision or 'default'}) it "
        f"could not be loaded: {reason}",
        hint="check the path or id; without a network pass a local file, or set data.revision to the 40-digit commit "
        "of a data set that was loaded before",
    )
