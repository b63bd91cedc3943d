"""Techniques that change memory and speed and never the result. Each states its cost and its identity.

Layer: beside `samples`; takes plain tensors and modules, never a config object.

Shape legend: T tokens of a row, N trained tokens, D hidden size, V vocabulary, C tokens of one chunk.
"""
