"""`python -m traceforge`: the command line, also for `torchrun --nproc-per-node 2 -m traceforge train RUN.toml`."""

import sys

if __name__ == "__main__":
    try:
        from traceforge.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
