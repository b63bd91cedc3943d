"""The model's config.json without a network: a given file, the model's folder, the hub's cache, or one shipped here.

`shapes/` has, for the hub ids that the shipped run files name, the values of their config.json that sizes follow from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from traceforge.errors import ModelError
from traceforge.samples.model_shape import ModelShape, shape_of

_SHIPPED = Path(__file__).parent / "shapes"


def find_shape(name_or_path: str, *, revision: str | None = None, given: Path | None = None) -> ModelShape:
    """Return the shape of a model.

    Args:
        name_or_path: as in the run file.
        revision: of a hub id, to find it in the cache.
        given: a config.json to use instead.

    Raises:
        ModelError: there is no config.json without asking the network, or it is of a family that cannot be planned.
    """
    path = given if given is not None else _find(name_or_path, revision)
    raw = _read(path)
    shape = shape_of(raw)
    if shape is None:
        family = raw.get("model_type")
        raise ModelError(
            f"{path}: model_type {family!r} cannot be planned, or sizes are missing",
            hint="dense decoders of the families llama, mistral, qwen2 and qwen3 can",
        )
    return shape


def _find(name_or_path: str, revision: str | None) -> Path:
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder / "config.json"
    cached = _cached(name_or_path, revision)
    if cached is not None:
        return cached
    shipped = _SHIPPED / f"{name_or_path.replace('/', '--')}.json"
    if shipped.is_file():
        return shipped
    raise ModelError(
        f"{name_or_path}: no such folder, not in the hub's cache, and planning asks no network",
        hint="give its config.json: --model-config config.json (a file of the model's page, a few kB)",
    )


def _cached(hub_id: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    except HFValidationError:  # a path, not a hub id
        return None
    return Path(found) if isinstance(found, str) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}", hint="give it with --model-config") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object")
    return raw
