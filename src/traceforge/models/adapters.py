"""LoRA adapters: adding a new one, going on from a saved one, saving with the base's revision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from traceforge.config import AdapterSettings
from traceforge.errors import ModelError


def add_adapter(model: nn.Module, settings: AdapterSettings, *, seed: int) -> nn.Module:
    """Return `model` wrapped by PEFT with one trainable LoRA adapter in float32; the base is frozen.

    A new adapter starts with B = 0 and A drawn from `seed`; `settings.init` is loaded and trained on.

    Raises:
        ModelError: no linear is named in `target_modules`, or the saved adapter does not fit these settings.
    """
    from peft import LoraConfig, PeftModel, get_peft_model

    known = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    missing = [name for name in settings.target_modules if name not in known]
    if missing:
        raise ModelError(
            f"adapter.target_modules: no linear called {', '.join(missing)} in this model",
            hint=f"its linears: {', '.join(sorted(known))}",
        )
    if settings.init is not None:
        _check_saved(settings.init, settings)
        wrapped: nn.Module = PeftModel.from_pretrained(model, str(settings.init), is_trainable=True)
    else:
        torch.manual_seed(seed)
        wrapped = get_peft_model(
            model,
            LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,
                lora_dropout=settings.dropout,
                target_modules=list(settings.target_modules),
                bias="none",
                task_type="CAUSAL_LM",
            ),
        )
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for module in wrapped.modules():
        # PEFT would copy every LoRA input to float32; under autocast the matmul narrows it again at once.
        if hasattr(module, "lora_A"):
            module.cast_input_dtype_enabled = False
    return wrapped


def _check_saved(folder: Path, settings: AdapterSettings) -> None:
    try:
        saved: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"adapter.init = {folder}: not a saved adapter: {error}",
            hint="give the folder that holds adapter_config.json and adapter_model.safetensors",
        ) from error
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"adapter.init = {folder}: adapter_model.safetensors is missing")
    asked = {"r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout}
    asked["target_modules"] = sorted(settings.target_modules)  # type: ignore[assignment]
    names = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}
    for key, wanted in asked.items():
        found = saved.get(key)
        found = sorted(found) if isinstance(found, list) else found
        if found != wanted:
            raise ModelError(
                f"adapter.{names[key]} is {wanted}, the adapter in {folder} has {found}",
                hint=f"set adapter.{names[key]} to the saved value",
            )


def adapter_base(folder: Path) -> tuple[str | None, str | None]:
    """Return the base model name and revision that a saved adapter was trained on."""
    saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    return saved.get("base_model_name_or_path"), saved.get("revision")


def save_adapter(model: nn.Module, folder: Path, *, base: str, revision: str | None) -> None:
    """Write the adapter with the base's name and commit in its config.

    Raises:
        ModelError: a weight is not finite; nothing is written then.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not torch.isfinite(parameter).all():
            raise ModelError(f"{name} is not finite; the adapter is not saved")
    for config in model.peft_config.values():
        config.base_model_name_or_path = base
        config.revision = revision
    # save_embedding_layers: its default would ask the hub whether the vocabulary was resized.
    model.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card says nothing
