"""Looking at the machine before a run: what works, what does not, and the way out of each.

Layer: above `models`, whose kernels it tries. `train` runs the short form first; `traceforge doctor` the whole.
"""
