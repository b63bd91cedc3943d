"""What a run leaves behind: the evidence schema, the recorder of its files, provenance, and the HTML report.

Layer: above `config` and `errors`, beside `samples`; `training` calls it. Imports no torch, reaches no network, so a
run is reported on a laptop.

    schema.py      evidence.json as models, its JSON Schema, and the decision as a pure function
    recorder.py    the run folder: configuration, manifest, one line per update and evaluation, evidence
    run_record.py  the same files read back, with what is missing or torn counted
    storage.py     writing so that nothing half-written looks whole, and JSON without NaN
    provenance.py  versions, hardware, revision, content hashes
    report.py      report.html: views.py says what stands in it, charts.py draws, templates/ lay out
"""
