"""Trajectories to samples to rows: rendering, tokens, masks, lengths, splits, packing.

Layer: above `trajectories`, beside `memory` and `objectives`. Imports no torch; arrays are numpy.

Shape legend: S tokens of one sample, T tokens of one row, N trained tokens of a row.
"""
