"""The settings: defaults, overrides, what is refused and how it is named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from traceforge.config import RunConfig
from traceforge.errors import ConfigError
from traceforge.run_files import load_run_file, parse_run

SMALLEST = '[model]\nname_or_path = "m"\n[data]\ntrain = "d"\n'


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SMALLEST, encoding="utf-8")
    return path


def refused(path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_run_file(path, overrides)
    return str(error.value)


def test_the_defaults_that_users_rely_on(run_file):
    config = load_run_file(run_file)
    assert (config.model.dtype, config.model.quantization, config.model.attention) == ("bfloat16", "none", "auto")
    assert (config.adapter.kind, config.adapter.rank, config.adapter.alpha, config.adapter.dropout) == (
        "lora",
        16,
        16,
        0,
    )
    assert config.adapter.target_modules == (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    data = config.data
    assert (data.rendering, data.target, data.loss_on, data.group) == ("chat", "turn", "target", "trajectory")
    assert (data.length_policy, data.seed, config.training.seed) == ("shorten_observations", 42, 42)
    assert (config.objective.method, config.optimizer.name, config.optimizer.learning_rate) == ("sft", "adamw", 2e-4)
    assert (config.training.samples_per_update, config.schedule.kind) == (4, "constant")
    assert config.evaluation.at_start


def test_overrides_are_read_as_toml_values_and_the_last_one_wins(run_file):
    config = load_run_file(
        run_file,
        [
            "training.updates=3",
            "training.updates=7",
            "optimizer.learning_rate=1e-3",
            "evaluation.at_start=false",
            "run_name=mine",
            'data.train=[{path="a", weight=0.5}, {path="b"}]',
            "optimizer.max_gradient_norm=none",
        ],
    )
    assert (config.training.updates, config.optimizer.learning_rate, config.run_name) == (7, 1e-3, "mine")
    assert not config.evaluation.at_start
    assert [(source.path, source.weight) for source in config.data.train] == [("a", 0.5), ("b", 1.0)]
    assert config.optimizer.max_gradient_norm is None


def test_none_is_a_value_where_a_setting_has_it_and_unsets_elsewhere(run_file):
    config = load_run_file(run_file, ["adapter.kind=none", "data.group=none", "evaluation.every_updates=none"])
    assert (config.adapter.kind, config.data.group, config.evaluation.every_updates) == ("none", "none", None)


def test_the_resolved_run_survives_json(run_file):
    config = load_run_file(run_file, ["training.passes=2", "adapter.rank=4"])
    assert RunConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_a_setting_of_an_objective_is_named_as_it_is_written(run_file):
    assert "unknown setting objective.betta (did you mean objective.beta?)" in refused(
        run_file, "objective.method=simpo", "objective.betta=3"
    )
    assert "objective.beta = -1: " in refused(run_file, "objective.method=simpo", "objective.beta=-1")


def test_an_unknown_setting_is_named_with_the_one_that_was_meant(run_file):
    assert "unknown setting optimizer.learning_rat (did you mean optimizer.learning_rate?)" in refused(
        run_file, "optimizer.learning_rat=1e-3"
    )
    assert "unknown setting trainin" in refused(run_file, "trainin.updates=3")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["training.updates=0"], ["training.updates", "0"]),
        (["model.dtype=float8"], ["model.dtype", "float8"]),
        (["training.updates=3", "training.passes=1"], ["training.updates", "training.passes"]),
        (["data.evaluation=x", "data.evaluation_fraction=0.1"], ["data.evaluation", "data.evaluation_fraction"]),
        (["data.max_tokens=4096", "training.tokens_per_row=1024"], ["training.tokens_per_row", "data.max_tokens"]),
        (["adapter.kind=none", "model.quantization=nf4"], ["adapter.kind", "model.quantization"]),
        (["adapter.kind=none", "adapter.init=x"], ["adapter.init", "adapter.kind"]),
        (["run_name=../escape"], ["run_name"]),
        (["no-equals-sign"], ["--set", "section.field=value"]),
        (["run_name.x=1", "run_name.y=2", "model.name_or_path.z=1"], ["model.name_or_path is not a section"]),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(run_file, overrides, named):
    message = refused(run_file, *overrides)
    for name in named:
        assert name in message


def test_a_missing_setting_is_named():
    with pytest.raises(ConfigError, match=r"run\.toml: missing setting model"):
        parse_run({"data": {"train": "d"}}, source="run.toml")


@pytest.mark.parametrize("content", [b"not = [toml", b"\xff\xfe\x00binary"])
def test_a_run_file_that_is_no_toml_is_refused_by_name(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    assert f"{path}: not a TOML file" in refused(path)


def test_a_run_file_that_is_not_there_or_is_a_folder_is_refused_by_name(tmp_path):
    assert "cannot read the run file" in refused(tmp_path / "none.toml")
    assert "cannot read the run file" in refused(tmp_path)


def test_the_settings_import_no_torch():
    program = "import sys, traceforge.config; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"memory": {"path": "generic", "placement": "streamed"}}, ("memory.path", "placement")),
        ({"memory": {"path": "generic", "recompute_attention": True}}, ("memory.path", "recompute_attention")),
        ({"memory": {"offload_inputs": True}}, ("offload_inputs", "recompute_layers")),
        ({"memory": {"path": "lean", "recompute_layers": True}}, ("memory.path", "recompute_layers")),
        ({"memory": {"placement": "streamed", "recompute_layers": True}}, ("placement", "recompute_layers")),
        ({"memory": {"path": "lean"}, "adapter": {"kind": "none"}}, ("memory.path", "adapter.kind")),
        ({"memory": {"path": "lean"}, "model": {"attention": "plain"}}, ("memory.path", "model.attention")),
    ],
    ids=str,
)
def test_settings_of_two_paths_through_the_layers_exclude_each_other(changes, named):
    raw = {"model": {"name_or_path": "m"}, "data": {"train": "d"}}
    raw = {**raw, **changes, "model": {**raw["model"], **changes.get("model", {})}}
    with pytest.raises(ConfigError) as caught:
        parse_run(raw, source="run.toml")
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["adapter.dropout=0.1", "model.attention=tree"], "model.attention = 'tree' cannot be honoured"),
        (["objective.method=simpo", "training.samples_per_update=8"], "use training.pairs_per_update"),
        (
            ["objective.method=dpo", "objective.gamma_beta_ratio=0.5"],
            "a setting of objective.method = 'simpo', not of 'dpo'",
        ),
    ],
)
def test_settings_of_another_method_and_shared_dropout_are_refused_by_name(overrides, message):
    with pytest.raises(ConfigError, match=message):
        parse_run({"model": {"name_or_path": "m"}, "data": {"train": "d"}}, source="run.toml", overrides=overrides)
