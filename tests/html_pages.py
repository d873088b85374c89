"""The page of a report, read by the tests: its elements, its text, and the figures of its charts."""

from __future__ import annotations

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


def items_of(page: Page) -> dict:
    """The charts of a page, by name."""
    return json.loads(next(text for text in page.scripts if text.startswith("{")))
