"""How far two texts agree, from the front and from the back."""

from __future__ import annotations


def common_prefix_length(one: str, other: str) -> int:
    """Return how many leading characters the two texts share, in O(length) of compiled comparison."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix_length(one: str, other: str) -> int:
    """Return how many trailing characters the two texts share."""
    return common_prefix_length(one[::-1], other[::-1])
