"""The update, the clock, the loop, the evaluation, and the run around them.

Layer: above `models`; below the command line. One update = one `optimizer.step()` that changed the weights.
"""
