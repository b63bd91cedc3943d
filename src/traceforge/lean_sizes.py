"""Sizes that the lean path works in. The layers use them and the planner counts with them; imports no torch."""

from __future__ import annotations

FULL_PASS = 2**19
"""Query heads x tokens that keep a card busy: attention's backward takes no more heads at a time than that needs."""
SHORT_ROW_TOKENS = 8192
"""The output layer of a row no longer than this comes while its layers run; a longer row needs the room itself."""
RANK_MULTIPLE = 64
"""On a card in 16 bits, the ranks of linears that share an input are padded to a multiple of this (tensor cores)."""
WINDOW_WEIGHTS = 2**23
"""Weights whose AdamW moments are on the card at one time, where they wait on the host."""


def key_heads_per_pass(heads: int, key_heads: int, tokens: int, *, full_pass: int = FULL_PASS) -> int:
    """Return the key heads that attention's backward takes at one time: a divisor of `key_heads`.

    Args:
        heads: query heads.
        key_heads: heads of keys and values.
        tokens: of the row.
        full_pass: see `FULL_PASS`.
    """
    together = min(key_heads, max(1, -(-full_pass // (heads // key_heads * tokens))))
    while key_heads % together:
        together += 1
    return together
