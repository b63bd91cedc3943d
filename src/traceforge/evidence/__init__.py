"""What a run leaves behind: the evidence schema, the recorder of its files, provenance, and the HTML report.

Layer: above `config` and `errors`, beside `samples`; `training` calls it. Imports no torch, reaches no network, so a
run is reported on a laptop.

    decision.py       the decision as a pure function of losses, gate and failure
    schema.py         evidence.json as models, and its JSON Schema
    recorder.py       the run folder while a run writes it
    rank_record.py    where each of several ranks stands
    run_record.py     the same files read back, with what is missing or torn counted
    storage.py        writing so that nothing half-written looks whole, and JSON without NaN
    provenance.py     versions, hardware, revision, content hashes
    report.py         report.html from a run folder; templates/ lay it out
    verdict_views.py  what the page says first: decision, checks, losses
    views.py          what it says further down: data, settings, facts
    masks.py          samples with their trained text
    figures.py        which series stand in which chart; charts.py draws them, summaries.py computes them
    formats.py        how numbers and text are written
"""
