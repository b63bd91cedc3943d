"""One reader per log format: a JSON value in, one `Trajectory` out, or a refusal with its reason.

Layer    Below `detect` (which knows all readers) and `ingest`; knows `record`, `refusals` and `text`.
Adding   A format is one module with a `READER` (see `reader.py`) and one entry in `detect.READERS`.
Shared   `messages.py` turns chat messages of every dialect into `Message`; the formats add what is theirs.
"""
