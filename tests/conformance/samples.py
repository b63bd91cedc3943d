"""Nine samples of different lengths and numbers of trained tokens, which fork from one another like an agent's turns.

Pairs inside one update share prefixes: with a fork before, inside and after the tokens that the other one trains, so
that some tokens are trained twice. A standard trainer runs each alone; ours runs the shared part once.
"""

from __future__ import annotations

from dataclasses import replace

from tests.tiny_models import random_samples
from traceforge.samples.tokens import Sample

_LENGTHS = (23, 5, 17, 40, 9, 31, 12, 26, 14)
_FORKS = {2: (0, 14), 3: (0, 19), 5: (4, 9), 7: (6, 4), 8: (7, 9)}
"""Sample: (the earlier sample it forks from, tokens they share)."""


def forking_samples() -> list[Sample]:
    """Return the nine samples, always the same."""
    samples = random_samples(_LENGTHS, trained_share=0.45)
    for number, (earlier, shared) in _FORKS.items():
        ids_S = samples[number].token_ids_S.copy()
        ids_S[:shared] = samples[earlier].token_ids_S[:shared]
        samples[number] = replace(samples[number], token_ids_S=ids_S)
    return samples


SAMPLES = forking_samples()
UPDATES = (SAMPLES[:4], SAMPLES[4:6], SAMPLES[6:])
"""Three updates; the second one is short."""
