"""The help pages as a user sees them, frozen under tests/data/cli/.

`python -m tests.help_pages` writes them again after a change that is meant.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "data" / "cli"
COMMANDS = (
    "", "demo", "ingest", "build", "build sft", "build pairs", "inspect", "plan", "doctor", "train", "evaluate",
    "compare", "report", "version",
)  # fmt: skip


def page_file(command: str) -> Path:
    """Return where the page of a command is kept."""
    return FOLDER / f"{command.replace(' ', '-') or 'traceforge'}.txt"


def help_page(command: str) -> str:
    """Return what `traceforge COMMAND --help` prints on a terminal of 100 columns without colour."""
    shown = subprocess.run(
        [sys.executable, "-c", "from traceforge.cli import main; main()", *command.split(), "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"},
    ).stdout
    return "\n".join(line.rstrip() for line in shown.replace("Usage: -c", "Usage: traceforge").splitlines()) + "\n"


if __name__ == "__main__":
    for each in COMMANDS:
        page_file(each).write_text(help_page(each), encoding="utf-8")
