"""HTML pages from Jinja templates, the one way to make one: everything is escaped, and an unknown name is an error."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def page_environment(*folders: Path) -> Environment:
    """Return an environment that finds templates in `folders`, the first that has one first."""
    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
