"""What a model thinks of preference pairs before it is trained on them: `traceforge inspect PAIRS --scores`."""

from __future__ import annotations

import torch

from traceforge.config import DataSource, RunConfig, SimpoObjective
from traceforge.errors import UsageError
from traceforge.models.language_model import load_language_model
from traceforge.models.load import locate_model
from traceforge.samples.pair_inspection import holds_pairs, whole_set
from traceforge.samples.pair_loading import load_pairs
from traceforge.samples.tokenizer import load_tokenizer
from traceforge.training.evaluation import without_trace
from traceforge.training.methods import Simpo


def score_pairs(dataset: str, config: RunConfig) -> dict[str, tuple[float, float]]:
    """Return each pair's mean log-probability per trained token, in nats: chosen and rejected, by pair id.

    Args:
        dataset: a folder made by `traceforge build pairs`; all of it is scored.
        config: model, adapter (`adapter.init` counts) and data settings.

    Raises:
        UsageError: the data set holds no pairs.
        InputError, ConfigError, ModelError: see `load_pairs` and `load_language_model`.
    """
    if not holds_pairs(dataset):
        raise UsageError(
            f"--scores: {dataset} is not a folder of preference pairs", hint="make one with `traceforge build pairs`"
        )
    location = locate_model(config.model.name_or_path, config.model.revision)
    tokenizer = load_tokenizer(str(location.folder), template_file=config.model.template_file)
    settings = whole_set(config.data, DataSource(path=dataset, weight=1.0))
    pairs = load_pairs(settings, tokenizer, template_kwargs=config.model.template_kwargs).train[0].pairs
    model = load_language_model(config, location, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    method = Simpo(SimpoObjective(method="simpo"))
    with without_trace(model.model):
        return method.mean_logprobs(model, pairs, tokens_per_row=config.tokens_per_row)
