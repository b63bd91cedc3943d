"""Finding and loading a base model: a folder, or a hub id at a resolved commit. Safetensors only, no remote code."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from traceforge.config import LINEAR_MODULES, AdapterSettings, ModelSettings
from traceforge.errors import HubError, ModelError
from traceforge.hashes import folder_sha256

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.txt", "*.jinja")


@dataclass(frozen=True)
class ModelLocation:
    """Where the base weights lie and which revision they are.

    Args:
        id: what the run file said.
        folder: local folder with the files.
        requested_revision: what the run file said, None for a folder.
        resolved_commit: the hub commit (40 hex digits), None for a folder.
        resolution_source: `hub` or `local_folder`.
    """

    id: str
    folder: Path
    requested_revision: str | None
    resolved_commit: str | None
    resolution_source: str

    def content_hash(self) -> str:
        """Return the sha256 over the folder's files: reads every weight once."""
        return folder_sha256(self.folder)


def locate_model(name_or_path: str, revision: str | None) -> ModelLocation:
    """Return the local folder of a model, downloading a hub id at the commit its revision resolves to.

    Raises:
        ModelError: the folder does not exist or holds no safetensors; or a revision is given for a folder.
        HubError: the hub cannot be reached or does not know the id or the revision.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelError(f"model.revision = {revision!r}: {name_or_path} is a folder, which has no revision")
        _require_files(folder)
        return ModelLocation(name_or_path, folder, None, None, "local_folder")
    if not _HUB_ID.match(name_or_path) or name_or_path.startswith((".", "/", "~")):
        raise ModelError(
            f"model.name_or_path = {name_or_path!r}: no such folder",
            hint="give a folder with config.json, safetensors and a tokenizer, or a hub id such as Qwen/Qwen3-0.6B",
        )
    location = _download(name_or_path, revision)
    _require_files(location.folder)
    return location


def _download(hub_id: str, revision: str | None) -> ModelLocation:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    way_out = "check the id and model.revision, or download the model and give its folder"
    try:
        if re.fullmatch(r"[0-9a-f]{40}", revision or ""):
            commit = str(revision)  # already a commit: no need to ask, so a cached one works offline
        else:
            commit = str(HfApi().model_info(hub_id, revision=revision).sha)
        folder = snapshot_download(hub_id, revision=commit, allow_patterns=list(_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HubError(
            f"model {hub_id!r} (no such folder; tried as a hub id): {reason}",
            hint=way_out,
        ) from error
    return ModelLocation(hub_id, Path(folder), revision or "main", commit, "hub")


def _require_files(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json", hint="a model folder holds config.json and *.safetensors")
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in folder.glob(pattern))
        found = f"; it holds {', '.join(others[:3])}" if others else ""
        raise ModelError(
            f"{folder}: no *.safetensors{found}",
            hint="only safetensors are loaded; convert with `save_pretrained(folder, safe_serialization=True)`",
        )


def load_base(location: ModelLocation, settings: ModelSettings, adapter: AdapterSettings, device: str) -> nn.Module:
    """Return the causal language model on `device`, in evaluation mode, with nothing trainable yet.

    Frozen weights take `settings.dtype`; with `adapter.kind = "none"` they are loaded in float32, to be trained.

    Raises:
        ModelError: the architecture is unknown to transformers or needs remote code, a weight is missing, or 4-bit
            was asked for and no linear came out in 4 bits.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = torch.float32 if adapter.kind == "none" else getattr(torch, settings.dtype)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "low_cpu_mem_usage": True}
    if settings.quantization == "nf4":
        options["quantization_config"] = _nf4(getattr(torch, settings.dtype))
        options["device_map"] = {"": device}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(location.folder),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(f"{location.id}: cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise ModelError(
            f"{location.id}: {len(missing)} weights are missing from the files, for example {missing[0]}",
            hint="the download may be incomplete, or config.json belongs to another model",
        )
    if settings.quantization == "nf4":
        _prepare_4bit(model, location)
    else:
        model = model.to(device)
    model.requires_grad_(False)
    model.config.use_cache = False
    return model.eval()


def _nf4(compute_dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def _prepare_4bit(model: nn.Module, location: ModelLocation) -> None:
    layers = linears_4bit(model)
    if not layers:
        raise ModelError(
            f"{location.id}: model.quantization = 'nf4' was asked for, but no linear came out in 4 bits",
            hint="set model.quantization = 'none'",
        )
    left = [name for name, module in model.named_modules() if _stayed_wide(name, module)]
    if left:
        raise ModelError(
            f"{location.id}: model.quantization = 'nf4' was asked for, but {len(left)} of {len(left) + len(layers)} "
            f"linears stayed unquantised, for example {left[0]}",
            hint="its quantization_config skips them: take another checkpoint, or this one as it is with "
            "model.quantization = 'none'",
        )
    for layer in layers:
        # On CPUs with AVX512-BF16 an eval-mode forward would repack the weights in place and ruin later gradients.
        layer.support_avx512bf16_for_cpu = False


def _stayed_wide(name: str, module: nn.Module) -> bool:
    return name.rsplit(".", 1)[-1] in LINEAR_MODULES and type(module) is nn.Linear


def linears_4bit(model: nn.Module) -> list[nn.Module]:
    """Return the bitsandbytes 4-bit linears of a model."""
    return [module for module in model.modules() if type(module).__name__ == "Linear4bit"]


def weight_bytes_by_dtype(model: nn.Module) -> dict[str, int]:
    """Return the bytes that parameters and buffers hold, by dtype (packed 4-bit weights count as uint8)."""
    totals: dict[str, int] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        name = str(tensor.dtype).removeprefix("torch.")
        totals[name] = totals.get(name, 0) + tensor.numel() * tensor.element_size()
    return dict(sorted(totals.items()))


def config_summary(folder: Path) -> dict[str, Any]:
    """Return the few entries of config.json that identify an architecture."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    keys = ("model_type", "architectures", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    return {key: raw.get(key) for key in keys}
