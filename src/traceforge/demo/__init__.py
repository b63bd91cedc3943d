"""The demo: bundled real trajectories, a small real model, and the whole way from raw logs to the report.

Layer: above `training`, below `cli`. Importing it loads no torch; nothing is fetched from a network.

    model.py             SmolLM2-135M-Instruct as safetensors, made once from an installed package
    tour.py              the five stages, timed
    sft_demo_cpu.toml    the run file of the demo
    data/                trajectories and labels, with source and licence
"""
