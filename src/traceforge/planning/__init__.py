"""Predicted memory, time and energy of a run file: arithmetic on a model's config, before any weight is there.

Layer: beside `models`; imports no torch. Bytes are bytes of one device or of the host; tables show GiB.
"""
