"""The page of a report, read by the tests: its elements, its text, and the figures of its charts."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    """The elements of a page, its text, and the text of its scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.attributes, self.texts, self.scripts = [], [], [], []
        self._in = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes += attributes
        self._in.append(tag)

    def handle_endtag(self, tag):
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data):
        inside = self._in[-1] if self._in else ""
        {"script": self.scripts, "style": []}.get(inside, self.texts).append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.texts))


def page_of(folder: Path) -> str:
    path = folder / "report.html"
    assert main_of("report", folder, "--html", path) == 0
    return path.read_text()


def main_of(*arguments) -> int:
    from telemetry.cli import main

    return main([str(argument) for argument in arguments])


def figures_of(page: Page) -> dict[str, list[tuple[str, list]]]:
    """The columns of each chart of a page: their names and their values."""
    drawings = json.loads(next(text for text in page.scripts if text.startswith("{")))
    (_, plots), *_ = drawings["roots"][0]["attributes"]["data"]["entries"]
    return {plot["attributes"]["name"]: [*columns(plot)] for plot in plots}


def columns(part):
    if isinstance(part, dict) and part.get("type") == "map":
        for name, value in part["entries"]:
            if isinstance(value, dict) and value.get("type") == "ndarray":
                yield name, decoded(value)
            elif isinstance(value, list) and value and isinstance(value[0], (str, int, float)):
                yield name, value
            elif isinstance(value, list):
                yield from ((name, decoded(each)) for each in value if isinstance(each, dict) and "array" in each)
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from columns(each)


def decoded(value: dict):
    """An array, as the page gets it."""
    import numpy as np

    raw = base64.b64decode(value["array"]["data"])
    raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    return np.frombuffer(raw, value["dtype"]).reshape(value["shape"])
