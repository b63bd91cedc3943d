"""Bad input by the command line: a named error with its exit code or a counted refusal, and nothing half-written."""

from __future__ import annotations

import json
import resource
import signal

import pytest

from tests.e2e.conftest import Ended, conversation, run, write_logs

GOOD = conversation("good")
ONLY_A_QUESTION = {"id": "question", "messages": [{"role": "user", "content": "Anyone there?"}]}


def assert_named(ended: Ended, code: int, *words: str) -> None:
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    assert "error: unexpected" not in ended.err
    assert ended.err.startswith("error: ") or "\nerror: " in ended.err
    assert "way out: " in ended.err
    for word in words:
        assert word in ended.err, ended.err


BAD_LOGS = {
    "unknown_format": ("notes.json", b'{"title": "not a log"}'),
    "truncated_json": ("cut.json", json.dumps(GOOD).encode()[:-30]),
    "binary_file": ("archive.json", b"PK\x03\x04" + bytes(range(256))),
    "not_utf8": ("old.json", json.dumps({**GOOD, "id": "caf\u00e9"}, ensure_ascii=False).encode("latin-1")),
    "not_utf8 (16 bits)": ("wide.json", json.dumps(GOOD).encode("utf-16")),
    "no_assistant_turn": ("question.json", json.dumps(ONLY_A_QUESTION).encode()),
    "empty_file": ("empty.json", b""),
}


@pytest.mark.parametrize("reason", BAD_LOGS)
def test_a_folder_of_bad_logs_alone_is_an_error_and_beside_a_good_one_a_counted_refusal(tmp_path, traceforge, reason):
    name, content = BAD_LOGS[reason]
    code = reason.partition(" ")[0]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / name).write_bytes(content)
    alone = traceforge("ingest", "logs", "-o", "out")
    assert_named(alone, 2, name, code)
    assert not (tmp_path / "out").exists()

    write_logs(tmp_path / "logs" / "zz-good.jsonl", [GOOD])
    beside = traceforge("ingest", "logs", "-o", "out", "--json")
    assert beside.code == 0, beside.err
    assert beside.json()["counts"]["trajectories"] == 1
    assert beside.json()["refusals_by_reason"] == {code: 1}
    (refusal,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["refusals"]
    assert (refusal["reason"], refusal["file"]) == (code, f"logs/{name}")


def test_an_empty_folder_and_one_that_is_not_there_are_named(tmp_path, traceforge):
    (tmp_path / "empty").mkdir()
    assert_named(traceforge("ingest", "empty", "-o", "out"), 2, "empty")
    assert_named(traceforge("ingest", "nowhere", "-o", "out"), 2, "nowhere")
    assert_named(traceforge("build", "sft", "empty", "-o", "out"), 2, "empty")
    assert not (tmp_path / "out").exists()


def test_a_failed_ingest_leaves_an_earlier_one_as_it_was(tmp_path, traceforge):
    write_logs(tmp_path / "good.jsonl", [GOOD])
    assert traceforge("ingest", "good.jsonl", "-o", "out").code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    write_logs(tmp_path / "bad.jsonl", [ONLY_A_QUESTION])
    assert_named(traceforge("ingest", "bad.jsonl", "-o", "out"), 2, "no_assistant_turn")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_a_model_path_that_does_not_exist_is_named_by_every_verb_that_needs_it(tmp_path, traceforge, run_file, samples):
    assert_named(traceforge("inspect", samples, "--model", "./no-model"), 2, "no-model", "no such folder")
    ended = traceforge("train", run_file, "--set", "model.name_or_path=./no-model")
    assert_named(ended, 2, "no-model", "no such folder")
    evidence = json.loads((tmp_path / "runs" / "tiny" / "evidence.json").read_text())
    assert evidence["decision"] == "reject_until_fixed"
    assert evidence["failure"]["stage"] == "revision_resolution"
    assert evidence["failure"]["error_type"] == "ModelError"
    assert (tmp_path / "runs" / "tiny" / "report.html").is_file()
    assert not (tmp_path / "runs" / "tiny" / "adapter").exists()


def test_a_model_without_safetensors_is_named(tmp_path, traceforge, run_file):
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    assert_named(traceforge("train", run_file, "--set", "model.name_or_path=./pickled"), 2, "pytorch_model.bin")


def test_a_template_that_fails_is_a_refusal_with_the_templates_own_words(tmp_path, traceforge, run_file):
    (tmp_path / "fails.jinja").write_text("{{ raise_exception('this template takes no system message') }}")
    ended = traceforge("train", run_file, "--set", "model.template_file=fails.jinja")
    assert_named(ended, 2, "template_error", "this template takes no system message", "every one of 12 samples")


def test_a_template_file_that_is_not_there_is_named(traceforge, run_file):
    ended = traceforge("train", run_file, "--set", "model.template_file=none.jinja")
    assert ended.code == 2
    assert "model.template_file = 'none.jinja'" in ended.err


def test_samples_that_lose_every_trained_token_to_the_cut_are_counted_and_if_all_do_it_is_an_error(
    traceforge, run_file, samples, tiny_model
):
    cut = ["--set", "data.length_policy=truncate_end"]
    some = traceforge("inspect", samples, "--model", tiny_model, *cut, "--set", "data.max_tokens=100", "--json")
    assert some.code == 0, some.err
    statistics = some.json()["statistics"]
    lost = statistics["refusals"]["nothing_trained"]["count"]
    assert lost > 0
    assert statistics["train"]["samples"] == 12 - lost
    none_left = traceforge("train", run_file, *cut, "--set", "data.max_tokens=20")
    assert_named(none_left, 2, "every one of 12 samples was refused", "nothing_trained 12", "data.max_tokens")


def test_when_every_sample_is_too_long_the_error_counts_them_and_says_what_to_raise(traceforge, run_file):
    ended = traceforge("train", run_file, "--set", "data.length_policy=refuse", "--set", "data.max_tokens=20")
    assert_named(ended, 2, "too_long 12", "raise data.max_tokens (20)")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.learning_rat=1", ("unknown setting optimizer.learning_rat", "learning_rate")),
        ("optimiser.learning_rate=1", ("unknown setting optimiser", "optimizer")),
        ("training.updates=many", ("training.updates", "many")),
    ],
)
def test_a_misspelt_or_wrong_setting_is_named_before_anything_is_made(tmp_path, traceforge, run_file, setting, words):
    ended = traceforge("train", run_file, "--set", setting)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.err
    assert not (tmp_path / "runs").exists()


def test_a_data_set_that_is_none_is_named(tmp_path, traceforge, run_file):
    write_logs(tmp_path / "rows.jsonl", [{"question": "?", "answer": "!"}])
    assert_named(traceforge("train", run_file, "--set", "data.train=rows.jsonl"), 2, "rows.jsonl:1", "'question'")
    assert_named(traceforge("train", run_file, "--set", "data.train=./none"), 2, "./none")


def limited(num_bytes: int):
    """Return what makes a child process unable to write a file beyond `num_bytes`, like a disk that is full."""

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return prepare


def test_a_disk_that_fills_up_while_ingesting_or_building_leaves_nothing(tmp_path, samples):
    for command in (
        ("ingest", "logs.jsonl", "-o", "out"),
        ("build", "sft", "trajectories", "-o", "out"),
    ):
        ended = run(*command, folder=tmp_path, preexec_fn=limited(500))
        assert_named(ended, 1, "out", "free space")
        assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_at_the_end_is_a_storage_error_with_evidence_and_no_half_adapter(tmp_path, run_file):
    ended = run(
        "train", run_file, "--set", "adapter.rank=160", "--set", "training.updates=1",
        folder=tmp_path, preexec_fn=limited(1_200_000),
    )  # fmt: skip
    assert_named(ended, 1, "could not be written")
    folder = tmp_path / "runs" / "tiny"
    evidence = json.loads((folder / "evidence.json").read_text())
    assert evidence["failure"]["error_type"] == "StorageError"
    assert evidence["failure"]["stage"] == "saving"
    assert len(evidence["candidate"]["update_losses"]) == 1
    assert not (folder / "adapter").exists()
    assert not list((folder / "checkpoints").glob("update-*"))
    assert not [path for path in folder.rglob("*") if "partial" in path.name]


def test_an_adapter_that_cannot_be_written_whole_is_not_there_at_all(tmp_path, traceforge, run_file, monkeypatch):
    def fill_the_disk(model, folder, **_: object) -> None:
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("traceforge.training.run.save_adapter", fill_the_disk)
    assert_named(traceforge("train", run_file, "--set", "training.updates=1"), 1, "No space left on device")
    folder = tmp_path / "runs" / "tiny"
    assert json.loads((folder / "evidence.json").read_text())["failure"]["stage"] == "saving"
    assert not [path for path in folder.rglob("*") if "adapter" in path.name]
    assert list((folder / "checkpoints").glob("update-000001"))
