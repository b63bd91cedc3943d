"""TraceForge: agent logs in, a LoRA adapter with evidence and a report out.

Importing this package does nothing: no torch, no network, no settings. Start at `traceforge.cli` (commands),
`traceforge.config` (every setting) or ARCHITECTURE.md (data flow and layers).
"""

__version__ = "0.1.0"
