"""Weights, adapters, attention over rows, and the one forward pass that training and evaluation share.

Layer: above `samples`, `memory` and `objectives`; below `training` and `oracles`.

Shape legend: T tokens of a row, N trained tokens, D hidden size, V vocabulary, H query heads, G key/value heads,
K head size. Attention tensors are [1, H or G, T, K].
"""
