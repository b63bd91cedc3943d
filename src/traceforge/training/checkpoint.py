"""Checkpoints: everything a run needs to go on as if it had never stopped.

Folder   `checkpoints/update-NNNNNN/` with `trained.safetensors` (the trained weights), `optimizer.pt` and `state.json`
         (clock, random generators' states, identity of data and settings). It appears under its name only when whole.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from traceforge.config import CheckpointSettings, RunConfig
from traceforge.errors import ConfigError, InputError, StorageError
from traceforge.models.language_model import LanguageModel
from traceforge.training.clock import Clock
from traceforge.training.loop import Job

SCHEMA_VERSION = "traceforge-checkpoint/1"
_FREE_TO_CHANGE = {
    "training.updates",
    "training.passes",
    "training.tokens_per_row",
    "training.max_skipped_updates",
    "output_dir",
    "run_name",
}
_FREE_SECTIONS = {"evaluation", "memory", "parallel", "checkpoint", "evidence"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read but not yet put into a model.

    Args:
        folder: where it lies.
        clock: the clock to go on from.
        state: the rest of state.json.
    """

    folder: Path
    clock: Clock
    state: dict[str, Any]


def save_checkpoint(run_folder: Path, job: Job, *, train_ids_hash: str) -> Path:
    """Write `checkpoints/update-NNNNNN` and return it; old ones beyond `checkpoint.keep` are removed after.

    Raises:
        StorageError: writing failed; older checkpoints stand as they were.
    """
    parent = run_folder / "checkpoints"
    folder = parent / f"update-{job.clock.updates:06d}"
    partial = parent / f".partial-{folder.name}"
    state = {
        "schema_version": SCHEMA_VERSION,
        "clock": job.clock.state(),
        "config": job.config.model_dump(mode="json"),
        "train_ids_hash": train_ids_hash,
        "method": job.method.state(),
        "scaler": None if job.scaler is None else job.scaler.state_dict(),
    }
    random_states = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(_trained_weights(job.model), str(partial / "trained.safetensors"))
        torch.save({"optimizer": job.optimizer.state_dict(), "random": random_states}, partial / "optimizer.pt")
        (partial / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(
            f"{folder}: the checkpoint could not be written: {error}",
            hint="free some disk space; the run can be extended from the checkpoint before",
        ) from error
    _remove_old(parent, job.config.checkpoint)
    return folder


def read_checkpoint(run_folder: Path) -> Checkpoint:
    """Return the newest whole checkpoint of a run.

    Raises:
        InputError: the folder is no run, has no checkpoint, or its newest one is damaged.
    """
    folders = sorted((run_folder / "checkpoints").glob("update-*"))
    if not folders:
        raise InputError(
            f"{run_folder}: no checkpoint to go on from",
            hint="give the folder of a run, the one with evidence.json and checkpoints/",
        )
    folder = folders[-1]
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        clock = Clock(**state["clock"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder}/state.json: damaged: {error}", hint="remove this folder to use an older one"
        ) from error
    return Checkpoint(folder, clock, state)


def check_continues(checkpoint: Checkpoint, config: RunConfig, train_ids_hash: str) -> None:
    """Refuse to go on with settings or data other than the checkpoint's.

    How long, how often to measure, memory techniques and names may change; anything that decides what an update does
    may not.

    Raises:
        ConfigError: a setting differs, or the training samples do.
    """
    before, now = _flat(checkpoint.state["config"]), _flat(config.model_dump(mode="json"))
    for name in sorted(before.keys() | now.keys()):
        if name in _FREE_TO_CHANGE or name.partition(".")[0] in _FREE_SECTIONS:
            continue
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"--extend: {name} is {now.get(name)!r}, the run was made with {before.get(name)!r}",
                hint="extend with the same settings, or start a new run with adapter.init",
            )
    if checkpoint.state["train_ids_hash"] != train_ids_hash:
        raise ConfigError(
            "--extend: the training samples are not the ones of the run",
            hint="give the same data, or start a new run with adapter.init",
        )


def restore(checkpoint: Checkpoint, job: Job) -> None:
    """Put weights, optimizer, clock, method and random generators of a job back as they were.

    Raises:
        InputError: a file is damaged or does not fit the model.
    """
    try:
        weights = load_file(str(checkpoint.folder / "trained.safetensors"))
        saved = torch.load(checkpoint.folder / "optimizer.pt", weights_only=True, map_location="cpu")
        trainable = dict(job.model.trainable())
        if weights.keys() != trainable.keys():
            raise KeyError(f"trained weights differ: {sorted(weights.keys() ^ trainable.keys())[:3]}")
        with torch.no_grad():
            for name, parameter in trainable.items():
                parameter.copy_(weights[name])
        job.optimizer.load_state_dict(saved["optimizer"])
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise InputError(f"{checkpoint.folder}: damaged or of another model: {error}") from error
    torch.set_rng_state(saved["random"]["cpu"])
    if torch.cuda.is_available() and len(saved["random"]["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["random"]["cuda"])
    if job.scaler is not None and checkpoint.state["scaler"] is not None:
        job.scaler.load_state_dict(checkpoint.state["scaler"])
    job.method.restore(checkpoint.state["method"])
    job.clock = checkpoint.clock


def _trained_weights(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu().contiguous() for name, parameter in model.trainable()}


def _remove_old(parent: Path, settings: CheckpointSettings) -> None:
    for folder in sorted(parent.glob("update-*"))[: -settings.keep]:
        shutil.rmtree(folder, ignore_errors=True)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key != "template_kwargs":
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
