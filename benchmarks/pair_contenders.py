"""One contender of `pairs.py`: a process that makes one SimPO update whenever it is told to.

    python benchmarks/pair_contenders.py {shared_prefix,cpo} WORK

Timed    The update alone, from its pair to the changed weights: rows, forward, backward, clipping and
         `optimizer.step()`; for `cpo` from `on_step_begin` to `on_step_end`, collating excluded.
Memory   Growth of the resident set from before the first update to its peak over all of them. All load the same way
         and have run a few tokens before, so every weight is in memory by then.
Gradient Of the first update, the warm-up, after clipping; left in a file to be compared.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from traceforge.config import RunConfig, SimpoObjective
from traceforge.models.language_model import LanguageModel, load_language_model
from traceforge.models.load import locate_model
from traceforge.oracles.cpo import cpo_trainer
from traceforge.samples.branches import Pair
from traceforge.training.methods import Simpo
from traceforge.training.optimizer import build_optimizer
from traceforge.training.update import apply_update, plan_update
from turns import Turns

CONTENDERS = ("shared_prefix", "cpo")
_LAYOUTS = {"shared_prefix": "tree", "cpo": "plain"}


@dataclass(frozen=True)
class PairWork:
    """What every contender does.

    Args:
        config: model, adapter, objective and optimizer.
        updates: the pairs of each update; the first is the warm-up.
        folder: where the gradient of the first update is left.
    """

    config: RunConfig
    updates: tuple[tuple[Pair, ...], ...]
    folder: Path


def load(work: PairWork, layout: str) -> LanguageModel:
    """Return the model in a layout, its adapter's B random so that A has a gradient too; alike in every process."""
    settings = work.config.model.model_copy(update={"attention": layout})
    config = work.config.model_copy(update={"model": settings})
    model = load_language_model(config, locate_model(settings.name_or_path, None), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.trainable():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    model.model.train()
    return model


def keep_gradient(model: LanguageModel, path: Path) -> Callable[[], None]:
    """Return what writes the present gradient to `path` when it is called for the first time."""

    def keep() -> None:
        if not path.exists():
            torch.save({name: parameter.grad for name, parameter in model.trainable()}, path)

    return keep


def run_ours(model: LanguageModel, work: PairWork, turns: Turns, keep: Callable[[], None]) -> None:
    """Make the updates with this project."""
    config = work.config
    assert isinstance(config.objective, SimpoObjective)
    optimizer = build_optimizer(model.trainable(), config.optimizer)
    optimizer.register_step_pre_hook(lambda *_: keep())
    method = Simpo(config.objective)
    turns.ready()
    for pairs in work.updates:
        turns.wait()
        update = plan_update(model, pairs, tokens_per_row=config.tokens_per_row, method=method)
        result = apply_update(model, update, optimizer, max_gradient_norm=config.optimizer.max_gradient_norm)
        turns.stop()
        turns.tell(result.loss, margin=result.logged["margin"], num_tokens=sum(r.num_tokens for r in update.rows))


def run_cpo(model: LanguageModel, work: PairWork, turns: Turns, keep: Callable[[], None]) -> None:
    """Make the updates with TRL's CPOTrainer on the same pairs, one a micro-batch."""
    from transformers import TrainerCallback

    config = work.config
    sizes = iter([sum(sample.num_tokens for pair in pairs for sample in pair.samples) for pairs in work.updates])

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            turns.wait()

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            keep()

        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            turns.stop()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **keywords: Any) -> None:
            if "loss" in logs:
                turns.tell(float(logs["loss"]), margin=float(logs["rewards/margins"]), num_tokens=next(sizes))

    with tempfile.TemporaryDirectory(prefix="traceforge-cpo-") as folder:
        settings = (config.optimizer, config.schedule)
        assert isinstance(config.objective, SimpoObjective)
        trainer = cpo_trainer(
            model.model, work.updates, config.objective, settings, folder=folder, callback=TakeTurns()
        )
        turns.ready()
        trainer.train()


def main() -> None:
    """Run the contender that the command line names."""
    name, path = sys.argv[1:]
    turns = Turns()
    work: PairWork = pickle.loads(Path(path).read_bytes())  # written by pairs.py a moment ago
    model = load(work, _LAYOUTS[name])
    keep = keep_gradient(model, work.folder / f"{name}.gradient")
    run = run_cpo if name == "cpo" else run_ours
    run(model, work, turns, keep)


if __name__ == "__main__":
    main()
