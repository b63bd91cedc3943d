"""The cache of tokenised samples, beside the data set: `<folder>/.cache/samples-<key>.npz`.

Key      Everything that can change a token: the renderer's fingerprint, the data's hash, and this format's version.
Linear   Turns of a trajectory repeat their history; each sample is stored as what differs from the one before it.
Never    A cache that cannot be read or written changes nothing but time: it is rebuilt, or not used. No pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from traceforge import __version__
from traceforge.samples.prefix_tree import common_prefix_length
from traceforge.samples.tokens import FloatArray, IntArray, Sample

FORMAT = "traceforge-samples/1"
KEPT_FILES = 8
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, slots=True)
class RefusedSample:
    """One turn that gave no sample."""

    sample_id: str
    task_id: str
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class RenderedFolder:
    """All turns of a built data set under one renderer, in file order; groups are trajectories.

    `without_system` are ids of samples whose history has no system message of its own.
    """

    samples: tuple[Sample, ...]
    refused: tuple[RefusedSample, ...]
    without_system: frozenset[str]


def cache_path(folder: Path, *, renderer_fingerprint: str, content_hash: str) -> Path:
    """Return where the samples of this data under this renderer are cached."""
    key = "\n".join((FORMAT, __version__, renderer_fingerprint, content_hash))
    return folder / ".cache" / f"samples-{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


def read_cache(path: Path) -> RenderedFolder | None:
    """Return the cached samples, or None if there are none or the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            held = {name: arrays[name] for name in arrays.files}
        return _unpack(held)
    except _UNREADABLE:
        return None


def write_cache(path: Path, rendered: RenderedFolder) -> bool:
    """Write the samples in one move and return True; return False if the place cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(exist_ok=True)
        with part.open("wb") as handle:
            np.savez_compressed(handle, allow_pickle=False, **_pack(rendered))
        part.replace(path)
        _remove_oldest(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # A folder that cannot be written cannot hold the part either.
            part.unlink(missing_ok=True)
        return False
    return True


def _remove_oldest(folder: Path) -> None:
    held = sorted(folder.glob("samples-*.npz"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in held[KEPT_FILES:]:
        path.unlink(missing_ok=True)


def _pack(rendered: RenderedFolder) -> dict[str, npt.NDArray[Any]]:
    previous: IntArray = np.empty(0, dtype=np.int64)
    shared: list[int] = []
    fresh: list[IntArray] = []
    for sample in rendered.samples:
        shared.append(common_prefix_length(previous, sample.token_ids_S))
        fresh.append(sample.token_ids_S[shared[-1] :])
        previous = sample.token_ids_S
    runs = [_weight_runs(sample.weights_S) for sample in rendered.samples]
    about = {
        "format": FORMAT,
        "samples": [[s.sample_id, s.group_id, s.task_id, list(s.cuts)] for s in rendered.samples],
        "refused": [[r.sample_id, r.task_id, r.code, r.detail] for r in rendered.refused],
        "without_system": sorted(rendered.without_system),
    }
    return {
        "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        "shared": np.array(shared, dtype=np.int64),
        "fresh_lengths": np.array([ids.size for ids in fresh], dtype=np.int64),
        "fresh_ids": _joined(fresh, np.int64),
        "run_counts": np.array([lengths.size for lengths, _ in runs], dtype=np.int64),
        "run_lengths": _joined([lengths for lengths, _ in runs], np.int64),
        "run_weights": _joined([weights for _, weights in runs], np.float64),
    }


def _unpack(held: dict[str, npt.NDArray[Any]]) -> RenderedFolder:
    about = json.loads(held["about"].tobytes())
    if about["format"] != FORMAT:
        raise ValueError(about["format"])
    fresh = np.split(held["fresh_ids"], np.cumsum(held["fresh_lengths"])[:-1])
    run_borders = np.cumsum(held["run_counts"])[:-1]
    run_lengths = np.split(held["run_lengths"], run_borders)
    run_weights = np.split(held["run_weights"], run_borders)
    samples: list[Sample] = []
    previous: IntArray = np.empty(0, dtype=np.int64)
    parts = zip(about["samples"], held["shared"], fresh, run_lengths, run_weights, strict=True)
    for (sample_id, group_id, task_id, cuts), shared, fresh_ids, lengths, weights in parts:
        previous = np.concatenate([previous[: int(shared)], fresh_ids])
        weights_S = np.repeat(weights, lengths)
        if weights_S.shape != previous.shape:
            raise ValueError(f"{sample_id}: {weights_S.shape} weights for {previous.shape} tokens")
        samples.append(Sample(sample_id, group_id, task_id, previous, weights_S, tuple(cuts)))
    refused = tuple(RefusedSample(*fields) for fields in about["refused"])
    return RenderedFolder(tuple(samples), refused, frozenset(about["without_system"]))


def _weight_runs(weights_S: FloatArray) -> tuple[IntArray, FloatArray]:
    starts = np.concatenate([[0], np.flatnonzero(np.diff(weights_S)) + 1]).astype(np.int64)
    return np.diff(np.append(starts, weights_S.size)), weights_S[starts]


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)
