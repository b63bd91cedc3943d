"""What a run says it computed: tokens of its rows and forks, beside the tokens of the same samples one by one."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.conformance.our_run import GivenOrder, run_config
from tests.dataset_stubs import sample
from tests.tiny_models import tiny_language_model

from traceforge.training.attempt import Attempt
from traceforge.training.clock import Clock
from traceforge.training.loop import Job, train
from traceforge.training.optimizer import build_optimizer
from traceforge.training.progress import RunProgress

pytestmark = pytest.mark.usefixtures("one_thread")


class Lines:
    """Stands where the recorder stands."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []

    def update(self, line: dict[str, Any]) -> None:
        self.updates.append(line)


def turns(*texts: str) -> tuple:
    return tuple(
        sample(f"run#{number}", [ord(c) for c in text], [0.0] + [1.0] * (len(text) - 1))
        for number, text in enumerate(texts)
    )


UPDATES = [turns("ppppppaaa", "ppppppbb", "ppppppbbcc"), turns("abcd", "abxy")]


def packing_of(attention: str, tmp_path, **sections: dict[str, Any]):
    config = run_config(data={"train": "none", "max_tokens": 10}, model={"name_or_path": "none"}, **sections)
    model, lines = tiny_language_model(attention=attention), Lines()
    job = Job(
        config=config,
        model=model,
        optimizer=build_optimizer(model.trainable(), config.optimizer),
        order=GivenOrder(UPDATES),
        sets={},
        passes=1,
        total_updates=2,
        clock=Clock(),
        recorder=lines,
        progress=RunProgress(Console(file=io.StringIO())),
        save=lambda: None,
    )
    train(job)
    attempt = Attempt(config, tmp_path, "real", torch.device("cpu"), model=model, job=job)
    packing = attempt.evidence().techniques.packing
    assert packing is not None
    assert packing.row_tokens == sum(line["row_tokens"] for line in lines.updates)
    assert packing.rows == sum(line["micro_batches"] for line in lines.updates)
    return packing


def test_a_tree_computes_each_shared_token_once(tmp_path) -> None:
    packing = packing_of("tree", tmp_path)
    assert (packing.sample_tokens, packing.row_tokens, packing.forks, packing.rows) == (27 + 8, 13 + 6, 2, 2)
    assert packing.mean_samples_per_row == 2.5


def test_a_trunk_that_is_computed_again_counts_again(tmp_path) -> None:
    packing = packing_of("tree", tmp_path, training={"tokens_per_row": 10})
    assert (packing.sample_tokens, packing.row_tokens, packing.forks, packing.rows) == (35, 9 + 10 + 6, 1, 3)


@pytest.mark.parametrize(("attention", "rows"), [("packed", 3), ("plain", 5)])
def test_without_sharing_both_counts_are_the_same(attention, rows, tmp_path) -> None:
    packing = packing_of(attention, tmp_path)
    assert (packing.sample_tokens, packing.row_tokens, packing.forks, packing.rows) == (35, 35, 0, rows)
