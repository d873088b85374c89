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


def items_of(page: Page) -> dict:
    """The charts of a page, by name."""
    return json.loads(next(text for text in page.scripts if text.startswith("{")))


def arrays_of(item) -> list:
    """The two-dimensional arrays in a drawing, as the page gets them."""
    import numpy as np

    if isinstance(item, dict) and item.get("type") == "ndarray" and len(item["shape"]) == 2:
        raw = gzip.decompress(base64.b64decode(item["array"]["data"]))
        return [np.frombuffer(raw, item["dtype"]).reshape(item["shape"])]
    below = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return [array for each in below for array in arrays_of(each)]


def columns_of(item: dict) -> dict[str, list[float]]:
    """The figures of the curves of a chart, by their label, in the unit of its axis."""
    import numpy as np

    found: dict = {}

    def look(part) -> None:
        if isinstance(part, dict):
            if part.get("type") == "map":
                for name, value in part["entries"]:
                    if isinstance(value, dict) and value.get("type") == "ndarray" and len(value["shape"]) == 1:
                        raw = base64.b64decode(value["array"]["data"])
                        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
                        found.setdefault(name, np.frombuffer(raw, value["dtype"]).tolist())
            part = list(part.values())
        for each in part if isinstance(part, list) else ():
            look(each)

    look(item["item"]["doc"])
    return {label: found[field] for field, label in item["fields"]}


def glyphs_of(item) -> list[tuple[str, str]]:
    """The kind and the colour of the glyphs in a drawing."""
    if isinstance(item, dict):
        own = []
        if item.get("name") == "GlyphRenderer":
            glyph = item["attributes"]["glyph"]
            colours = (glyph["attributes"].get(name) for name in ("fill_color", "line_color"))
            own = [(glyph["name"], next((each["value"] for each in colours if isinstance(each, dict)), ""))]
        return own + [pair for each in item.values() for pair in glyphs_of(each)]
    return [pair for each in item for pair in glyphs_of(each)] if isinstance(item, list) else []


def table_of(text: str, after: str) -> list[list[str]]:
    """The rows of the first table after some text of a page, headings first."""
    table = text.partition(after)[2].partition("<table>")[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    return [
        [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in rows
    ]
