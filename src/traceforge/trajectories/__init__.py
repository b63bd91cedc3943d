"""Agent logs to trajectories: detection by content, one reader per format, outcomes, the ingest command.

Layer: above `config` and `errors`, below everything else. Imports no torch. Streams: memory does not grow with the
number of trajectories.
"""
