"""Reading a run file: TOML and `--set` overrides in, validated settings out; mistakes are named with their way out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from traceforge.config import RunConfig
from traceforge.errors import ConfigError, closest


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run file at `path` with `section.field=value` overrides applied in order.

    A relative path inside the file means relative to the working directory, like every path on the command line.

    Raises:
        ConfigError: the file is missing or no TOML, or a setting is unknown or wrong; the message names it.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the run file: {error.strerror}", hint="see examples/") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    return parse_run(raw, source=str(path), overrides=overrides)


def parse_run(raw: dict[str, Any], *, source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the validated run, with `section.field=value` overrides applied; `source` names the file in errors.

    Raises:
        ConfigError: see `load_run_file`.
    """
    for override in overrides:
        _apply(raw, override)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(lines)) from error


def _apply(raw: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"--set {override!r}: expected section.field=value", hint="--set training.updates=20")
    target = raw
    for depth, key in enumerate(keys[:-1], start=1):
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(keys[:depth])} is not a section")
    target[keys[-1]] = _parse_value(text.strip(), keys)


def _parse_value(text: str, keys: Sequence[str]) -> Any:
    """Read a value as TOML; a bare word is a string, `none` unsets a setting unless it is one of its values."""
    if text.lower() in {"none", "null"} and text not in get_args(_annotation(keys)):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(problem: Any) -> str:
    path = [str(key) for key in problem["loc"]]
    # `objective.simpo.beta`: the method that chose the section is part of the path, not of the setting's name.
    keys = [key for depth, key in enumerate(path) if not _members(_annotation(path[:depth]))]
    name = ".".join(keys)
    if problem["type"] == "extra_forbidden":
        guess = closest(keys[-1], _known_names(path[:-1]))
        others = [method for method, each in _members(_annotation(path[:1])).items() if keys[-1] in each.model_fields]
        if others:
            return (
                f"{name} is a setting of {keys[0]}.method = '{others[0]}', not of '{path[1]}'; take it out of the file"
            )
        return f"unknown setting {name}" + (f" (did you mean {'.'.join([*keys[:-1], guess])}?)" if guess else "")
    if problem["type"] == "missing":
        return f"missing setting {name}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message
    given = json.dumps(problem["input"], default=str, ensure_ascii=False)
    return f"{name} = {given if len(given) <= 80 else given[:77] + '...'}: {message}"


def _known_names(keys: Sequence[str]) -> list[str]:
    model = _annotation(keys)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _annotation(keys: Sequence[str]) -> Any:
    """Return the type of the setting or section called `keys`, or None if there is none."""
    model: Any = RunConfig
    for key in keys:
        if key in (members := _members(model)):
            model = members[key]
            continue
        field = model.model_fields.get(key) if isinstance(model, type) and issubclass(model, BaseModel) else None
        model = field.annotation if field is not None else None
    return model


def _members(annotation: Any) -> dict[str, Any]:
    """Return the sections that `method` chooses from, by method; empty if `annotation` is no such choice."""
    sections = [each for each in get_args(annotation) if isinstance(each, type) and issubclass(each, BaseModel)]
    return {
        method: each
        for each in sections
        if "method" in each.model_fields
        for method in get_args(each.model_fields["method"].annotation)
    }
