"""Objectives: pure maths on log-probabilities. Every loss is a sum; the caller divides once per update.

Layer: beside `samples` and `memory`; plain arguments only.

Shape legend: N trained tokens of a row.
"""
