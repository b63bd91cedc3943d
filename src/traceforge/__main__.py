"""`python -m traceforge`: the command line, also for `torchrun --nproc-per-node 2 -m traceforge train RUN.toml`."""

from traceforge.cli import main

if __name__ == "__main__":
    main()
