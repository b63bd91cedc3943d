"""Oracles: the same samples through the standard trainers, to be compared with what this project did.

    samples, weights ─┬─▶ our loop ─────────▶ TrainingTrace ─┐
                      └─▶ trl / accelerate ─▶ TrainingTrace ─┴─▶ compare_traces ─▶ ConformanceRecord

An oracle never changes the network it is given; it trains a copy. The libraries are imported when an oracle runs, not
before. Layer: beside `training`, which it never imports; above `models`.

Files    trace.py what a run left behind · record.py the comparison · trl.py, accelerate.py the two oracles.
"""
