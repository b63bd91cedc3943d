"""One contender of `trees.py`: a process that makes one update of the weights whenever it is told to.

    python benchmarks/tree_contenders.py {tree,plain,trl} WORK

Timed    The update alone, from its samples to the changed weights: for `tree` and `plain` building the rows, forward
         and backward of every row, clipping and `optimizer.step()`; for `trl` from `on_step_begin` to `on_step_end`,
         which is forward and backward of every row, clipping and `optimizer.step()`. TRL's rows are collated before.
Memory   Growth of the resident set from before the first update to its peak over all of them.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from traceforge.config import AdapterSettings, OptimizerSettings, ScheduleSettings
from traceforge.models.adapters import add_adapter
from traceforge.models.language_model import LanguageModel, choose_layout
from traceforge.oracles.trl import sft_trainer
from traceforge.samples.tokens import Sample
from traceforge.training.optimizer import build_optimizer
from traceforge.training.update import apply_update, plan_update
from turns import Turns

CONTENDERS = ("tree", "plain", "trl")
OPTIMIZER = OptimizerSettings(learning_rate=2e-4, max_gradient_norm=1.0)
SCHEDULE = ScheduleSettings(kind="constant")


@dataclass(frozen=True)
class Work:
    """What every contender does.

    Args:
        shape: of the random Qwen3.
        rank: of its LoRA adapter.
        updates: samples of each update; the first is a short warm-up.
        tokens_per_row: longest row of the trees.
        threads: that a contender computes on.
    """

    shape: dict[str, Any]
    rank: int
    updates: tuple[tuple[Sample, ...], ...]
    tokens_per_row: int
    threads: int


def random_network(work: Work) -> nn.Module:
    """Return the random Qwen3 in float32 with its adapter, B random; the same numbers in every process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **work.shape), attn_implementation="sdpa")
    base = base.float().requires_grad_(False)
    network = add_adapter(base, AdapterSettings(rank=work.rank, alpha=work.rank), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return network.train()


def run_ours(layout: str, work: Work, turns: Turns) -> None:
    """Make the updates with this project, samples as prefix trees or each in a plain row."""
    model = LanguageModel(random_network(work), torch.device("cpu"), torch.float32)
    choose_layout(model, layout)
    optimizer = build_optimizer(model.trainable(), OPTIMIZER)
    turns.ready()
    for samples in work.updates:
        turns.wait()
        update = plan_update(model, samples, tokens_per_row=work.tokens_per_row)
        result = apply_update(model, update, optimizer, max_gradient_norm=OPTIMIZER.max_gradient_norm)
        turns.stop()
        turns.tell(result.loss)


def run_trl(work: Work, turns: Turns) -> None:
    """Make the updates with TRL's SFTTrainer on the same samples, one a micro-batch."""
    from transformers import TrainerCallback

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            turns.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            turns.stop()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **keywords: Any) -> None:
            if "loss" in logs:
                turns.tell(float(logs["loss"]))

    with tempfile.TemporaryDirectory(prefix="traceforge-trl-") as folder:
        trainer = sft_trainer(
            random_network(work), work.updates, OPTIMIZER, SCHEDULE, folder=folder, callback=TakeTurns()
        )
        turns.ready()
        trainer.train()


def main() -> None:
    """Run the contender that the command line names."""
    name, path = sys.argv[1:]
    turns = Turns()
    work: Work = pickle.loads(Path(path).read_bytes())  # written by trees.py a moment ago
    torch.set_num_threads(work.threads)
    if name == "trl":
        run_trl(work, turns)
    else:
        run_ours(name, work, turns)


if __name__ == "__main__":
    main()
