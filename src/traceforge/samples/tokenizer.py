"""Loading a tokenizer, and the hash of everything in it that can change a token.

Layer    The one module of `samples` that meets transformers, late, inside the call: importing it stays cheap.
Remote   Code from a model's folder is never run (`trust_remote_code` is off), and a folder never asks the network.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from traceforge.errors import ConfigError, HubError, ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def load_tokenizer(name_or_path: str, *, revision: str | None = None, template_file: Path | None = None) -> Any:
    """Return the fast tokenizer of a folder or hub id, with the template of `template_file` if one is given.

    A tokenizer without any template loads: only rendering a conversation needs one.

    Raises:
        ConfigError: `template_file` cannot be read.
        ModelError: there is no such folder, it holds no fast tokenizer, or its files are damaged.
        HubError: the hub id could not be resolved or downloaded.
    """
    template = None if template_file is None else _read_template(template_file)
    is_folder = Path(name_or_path).is_dir()
    if not is_folder and not _HUB_ID.fullmatch(name_or_path):
        raise ModelError(
            f"model.name_or_path = {name_or_path!r}: no such folder, and not a hub id (`owner/name`)",
            hint="pass a folder with tokenizer.json and safetensors, or a hub id",
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            name_or_path,
            revision=None if is_folder else revision,
            local_files_only=is_folder,
            trust_remote_code=False,
        )
    except Exception as error:  # a damaged file raises anything, from KeyError to the bare Exception of tokenizers
        raise _explain(name_or_path, is_folder, error) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"{name_or_path}: its tokenizer ({type(tokenizer).__name__}) is a slow one, without token offsets",
            hint="put a tokenizer.json beside it: load it once with transformers and call save_pretrained",
        )
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the sha256 of the tokenizer's vocabulary, merges, added tokens, special tokens and chat template."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # These two are call state that transformers leaves behind in the tokenizer, not part of what it is.
    backend.pop("truncation", None)
    backend.pop("padding", None)
    content = {
        "tokenizer": backend,
        "template": tokenizer.chat_template,
        "special_tokens": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"model.template_file = {str(path)!r}: cannot read it: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"model.template_file = {str(path)!r}: not UTF-8 text: {error.reason} at byte {error.start}",
            hint="a chat template is a Jinja text file, such as chat_template.jinja of a model's folder",
        ) from error


def _explain(name_or_path: str, is_folder: bool, error: Exception) -> ModelError | HubError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if not is_folder:
        return HubError(
            f"{name_or_path}: its tokenizer could not be fetched: {reason}",
            hint="check id, revision and network, or download the model and pass its folder",
        )
    if not (Path(name_or_path) / "tokenizer.json").is_file():
        return ModelError(
            f"{name_or_path}: no tokenizer.json in this folder",
            hint="pass the folder of a whole model, with tokenizer.json, tokenizer_config.json and safetensors",
        )
    return ModelError(f"{name_or_path}: its tokenizer cannot be loaded: {reason}", hint="download the model again")
