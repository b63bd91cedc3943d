"""Loading tokenizers: what is refused, and what their fingerprint covers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fixtures_tokenizers import CHATML, MISTRAL, tiny_tokenizer

from traceforge.errors import ConfigError, ModelError
from traceforge.samples.tokenizer import load_tokenizer, tokenizer_fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_its_fast_tokenizer_and_template(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.is_fast
    assert tokenizer.chat_template == CHATML


def test_a_template_file_replaces_the_tokenizers_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(MISTRAL, encoding="utf-8")
    assert load_tokenizer(str(folder), template_file=tmp_path / "mine.jinja").chat_template == MISTRAL


def test_a_template_file_that_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.template_file.*missing\.jinja"):
        load_tokenizer(str(folder), template_file=tmp_path / "missing.jinja")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_tokenizer(str(folder), template_file=tmp_path / "binary.jinja")


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere/at/all", "just-a-word"])
def test_a_path_that_does_not_exist_is_no_hub_id(path: str) -> None:
    with pytest.raises(ModelError, match="no such folder") as caught:
        load_tokenizer(path)
    assert caught.value.hint


def test_a_folder_without_tokenizer_json_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_tokenizer_json_is_a_named_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": ', encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(str(folder))


def test_a_slow_tokenizer_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    class Slow:
        is_fast = False

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: Slow())
    with pytest.raises(ModelError, match="slow"):
        load_tokenizer(str(folder))


def test_code_in_a_models_folder_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Evil: pass\n", encoding="utf-8")
    with contextlib.suppress(ModelError):
        load_tokenizer(str(folder))
    assert not (folder / "ran").exists()


def test_the_fingerprint_is_of_content_and_template_and_not_of_use(folder: Path) -> None:
    first, second = load_tokenizer(str(folder)), load_tokenizer(str(folder))
    plain = tokenizer_fingerprint(first)
    second(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(second) == plain
    second.chat_template = MISTRAL
    assert tokenizer_fingerprint(second) != plain
    first.add_tokens(["zzz"])
    assert tokenizer_fingerprint(first) != plain


def test_importing_the_renderer_imports_neither_torch_nor_transformers() -> None:
    check = "import sys, traceforge.samples.render as _; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
