"""The pages of the documentation and the tools that write them, for the tests that read them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def text_of(path):
    return path.read_text(encoding="utf-8")


def table(text, heading):
    """The cells of the table below a heading, row by row, without its first two lines."""
    section = text.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows[2:]]


def load_tool(name):
    """A script of docs/tools as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
