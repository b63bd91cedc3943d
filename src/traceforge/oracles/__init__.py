"""Oracles: the same samples through the standard trainers, to be compared with what this project did.

    samples, weights ─┬─▶ our loop ─────────▶ TrainingTrace ─┐
                      └─▶ trl / accelerate ─▶ TrainingTrace ─┴─▶ compare_traces ─▶ ConformanceRecord

An oracle never changes the network it is given; it trains a copy, and it imports nothing of what it checks (a layer
contract). The libraries are imported when an oracle runs, not before. Layer: above `training`, whose real loop is the
other side.

Files    trace.py what a run left behind · watch.py how it is followed · trainer.py what TRL's trainers share ·
         trl.py, cpo.py, accelerate.py the oracles · record.py the comparison · our_run.py our side ·
         compare.py the command, comparison_table.py what it prints.
"""
