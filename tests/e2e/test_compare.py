"""`traceforge compare` by the command line: agreement, planted differences, refusals, and what is left of a failure."""

from __future__ import annotations

import json

import pytest

from traceforge.oracles import compare as compare_module
from traceforge.oracles.record import ConformanceRecord, Tolerances

RECORD_FIELDS = {"status", "check_kind", "versions", "framework_paths", "checks", "figures", "tolerances"}


@pytest.fixture
def simpo_file(tmp_path, tiny_model, traceforge):
    """A run of SimPO on five built pairs, two an update; one of them has endings of two turns."""
    rows = [{"prompt": f"Question {n}?", "chosen": f"Answer {n}.", "rejected": f"No {n * 7} idea."} for n in range(4)]
    shared = [{"role": "user", "content": "Look and tell."}, {"role": "assistant", "content": "Look."}]
    endings = {
        side: [
            *shared,
            {"role": "user", "content": f"Seen {side}."},
            {"role": "assistant", "content": f"It is {side}."},
        ]
        for side in ("chosen", "rejected")
    }
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, endings]), encoding="utf-8")
    built = traceforge("build", "pairs", "rows.jsonl", "-o", "pairs")
    assert built.code == 0, built.err
    path = tmp_path / "simpo.toml"
    path.write_text(
        f"""
run_name = "tiny-simpo"
[model]
name_or_path = "{tiny_model}"
[adapter]
rank = 4
[data]
train = "pairs"
max_tokens = 256
[objective]
method = "simpo"
[training]
passes = 1
pairs_per_update = 2
""",
        encoding="utf-8",
    )
    return path


def record_in(folder) -> dict:
    return json.loads((folder / "compare.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("oracle", ["trl", "accelerate"])
def test_an_sft_run_agrees_with_both_oracles(oracle, traceforge, run_file, tmp_path):
    ended = traceforge(
        "compare", run_file, "--with", oracle, "--updates", "3", "--set", "schedule.kind=linear", "--json"
    )
    assert ended.code == 0, ended.err
    document = ended.json()
    record = record_in(tmp_path / document.pop("folder"))
    assert record == document
    assert record.keys() == RECORD_FIELDS
    assert (record["status"], record["check_kind"]) == ("passed", "framework_conformance")
    assert all(record["checks"].values())
    assert record["figures"]["updates"] == {"ours": 3, "theirs": 3}
    assert record["figures"]["trained_tensors"] == 28
    assert len(record["figures"]["update_items"]) == 3
    for name in ("losses", "gradient_norms", "seconds"):
        assert len(record["figures"][name]["ours"]) == len(record["figures"][name]["theirs"]) == 3
    run = json.loads((tmp_path / "runs" / "compare-tiny" / "run.json").read_text(encoding="utf-8"))
    assert run["training"]["updates"] == 3


def test_a_simpo_run_agrees_with_cpo_trainer_and_says_what_it_compared(traceforge, simpo_file, tmp_path):
    ended = traceforge("compare", simpo_file, "--with", "trl")
    assert ended.code == 0, ended.out + ended.err
    assert "they agree: all 14 checks passed" in ended.out
    assert "the run file says bfloat16; float32 on both sides" in ended.out
    for figure in ("chosen log-prob", "rejected reward", "reward margin", "preference accuracy", "gradient norm",
                   "weight changes, worst tensor", "seconds an update", "peak memory"):  # fmt: skip
        assert figure in ended.out
    record = record_in(tmp_path / "runs" / "compare-tiny-simpo")
    assert record["figures"]["dtype"] == {"run_file": "bfloat16", "compared": "float32"}
    assert record["framework_paths"]["trl"] == "trl.experimental.cpo.CPOTrainer.train"
    assert [len(items) for items in record["figures"]["update_items"]] == [2, 2]


@pytest.mark.parametrize(
    ("planted", "noticed_by"),
    [
        ("objective.beta=3", {"losses", "rewards", "gradients"}),
        ("objective.gamma=0.6", {"losses", "gradients"}),
        ("optimizer.learning_rate=2e-5", {"learning_rates", "weight_changes"}),
        ("schedule.kind=linear", {"learning_rates", "weight_changes"}),
        ("optimizer.max_gradient_norm=0.01", {"gradients"}),
    ],
)
def test_a_planted_difference_exits_with_3_and_leaves_its_record(planted, noticed_by, traceforge, simpo_file, tmp_path):
    ended = traceforge("compare", simpo_file, "--with", "trl", "--oracle-set", planted)
    assert ended.code == 3, ended.out + ended.err
    assert f"planted for trl alone: {planted}" in ended.out
    assert "DIFFERS" in ended.out
    assert "this project and trl disagree" in ended.err
    assert "Traceback" not in ended.err
    record = record_in(tmp_path / "runs" / "compare-tiny-simpo")
    assert record["status"] == "failed"
    assert noticed_by <= {name for name, passed in record["checks"].items() if not passed}
    assert record["figures"]["oracle_overrides"] == [planted]


def test_a_planted_difference_of_an_sft_run_is_seen_too(traceforge, run_file):
    ended = traceforge(
        "compare", run_file, "--with", "accelerate", "--oracle-set", "optimizer.weight_decay=0.5", "--json"
    )
    assert ended.code == 3
    assert ended.json()["status"] == "failed"
    assert not ended.json()["checks"]["weight_changes"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--with", "deepspeed"], "the oracles are trl and accelerate"),
        (["--with", "accelerate"], "--with accelerate runs sft only"),
        (["--with", "trl", "--set", "model.quantization=nf4"], "model.quantization"),
        (["--with", "trl", "--set", "adapter.dropout=0.1"], "adapter.dropout"),
        (["--with", "trl", "--set", "optimizer.name=adamw_8bit"], "optimizer.name"),
        (["--with", "trl", "--set", "schedule.warmup_updates=2"], "schedule.warmup_updates"),
        (["--with", "trl", "--set", "parallel.pairs=branch_parallel"], "parallel.pairs"),
        (["--with", "trl", "--oracle-set", "data.max_tokens=64"], "--oracle-set data"),
        (["--with", "trl", "--oracle-set", "training.seed=1"], "--oracle-set training"),
        (["--with", "trl", "--oracle-set", "model.dtype=bfloat16"], "--oracle-set model"),
        (["--with", "trl", "--oracle-set", "objective.betta=3"], "objective.betta"),
        (["--with", "trl", "--updates", "0"], "--updates"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name_before_anything_is_loaded(
    arguments, named, traceforge, simpo_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(compare_module, "locate_model", lambda *a: pytest.fail("loaded"))
    ended = traceforge("compare", simpo_file, *arguments)
    assert ended.code == 2, ended.err
    assert named in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "runs").exists()


def test_dpo_has_no_oracle_and_says_so(traceforge, simpo_file):
    simpo_file.write_text(simpo_file.read_text(encoding="utf-8").replace('"simpo"', '"dpo"'), encoding="utf-8")
    ended = traceforge("compare", simpo_file, "--with", "trl")
    assert ended.code == 2
    assert "objective.method = 'dpo' has no oracle here" in ended.err


def test_a_side_that_breaks_down_leaves_a_record_that_says_so(traceforge, simpo_file, tmp_path, monkeypatch):
    def breaks(*arguments, **keywords):
        raise RuntimeError("the trainer fell over")

    monkeypatch.setattr(compare_module, "trl_simpo", breaks)
    ended = traceforge("compare", simpo_file, "--with", "trl")
    assert ended.code == 1
    assert "the trainer fell over" in ended.err
    record = record_in(tmp_path / "runs" / "compare-tiny-simpo")
    assert record.keys() == RECORD_FIELDS
    assert (record["status"], record["checks"]) == ("failed", {"both_sides_ran": False})
    assert "the trainer fell over" in record["figures"]["failure"]["message"]


def test_what_is_not_a_number_is_null_in_the_record_and_disagrees(traceforge, simpo_file, tmp_path, monkeypatch):
    real = compare_module.trl_simpo

    def without_a_loss(*arguments, **keywords):
        trace = real(*arguments, **keywords)
        return type(trace)(**{**vars(trace), "losses": (float("nan"), *trace.losses[1:])})

    monkeypatch.setattr(compare_module, "trl_simpo", without_a_loss)
    ended = traceforge("compare", simpo_file, "--with", "trl", "--json")
    assert ended.code == 3
    assert ended.json()["figures"]["losses"]["theirs"][0] is None
    assert record_in(tmp_path / "runs" / "compare-tiny-simpo")["non_finite"]


def test_a_failed_check_is_named_in_the_error(tmp_path):
    record = ConformanceRecord("failed", {}, {}, {"losses": False, "gradients": True}, {"oracle": "trl"}, {})
    with pytest.raises(compare_module.DisagreementError, match="this project and trl disagree: losses"):
        compare_module.Comparison(tmp_path, record).require_agreement()
    assert vars(compare_module.REAL_WEIGHTS).keys() == vars(Tolerances()).keys()
