"""Reads a metrics endpoint as Prometheus does: over HTTP, and only from the text of the response."""

from __future__ import annotations

import http.client
import re
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from telemetry.util.clock import monotonic

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_TIMEOUT_SECONDS: Final = 2.0
"""Of each part of the response."""

_WHOLE_SECONDS: Final = 10.0
_MAX_BYTES: Final = 64 << 20
_CHUNK: Final = 1 << 18

_SAMPLE: Final = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")


class ScrapeError(Exception):
    """The endpoint gave no metrics; the text says why."""


class ExpositionSample(NamedTuple):
    """One line of an exposition."""

    name: str
    labels: dict[str, str]
    value: float


def fetch(url: str) -> str:
    """The exposition at a URL. A proxy that the environment names is not used.

    Raises:
        ScrapeError: there is no response within 10 s, it is not status 200, or it is larger than 64 MiB.
    """
    try:
        where = urlsplit(url)
        kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}[where.scheme]
        connection = kind(where.hostname or "", where.port, timeout=_TIMEOUT_SECONDS)
    except (KeyError, ValueError) as error:
        raise ScrapeError(f"{url} is no URL of metrics: it begins with http:// and names a host and a port") from error
    try:
        path = where.path or "/metrics"
        connection.request("GET", f"{path}?{where.query}" if where.query else path)
        answer = connection.getresponse()
        text = _body(answer).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ScrapeError(f"{url} does not answer: {error}") from error
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise ScrapeError(f"{url} answers {answer.status}: {text.strip()[:200]}")
    return text


def _body(answer: http.client.HTTPResponse) -> bytes:
    """All of a response.

    Raises:
        ValueError: it takes too long or is too large.
    """
    deadline, body = monotonic() + _WHOLE_SECONDS, bytearray()
    while chunk := answer.read1(_CHUNK):
        body += chunk
        if len(body) > _MAX_BYTES:
            raise ValueError(f"the response is larger than {_MAX_BYTES >> 20} MiB")
        if monotonic() > deadline:
            raise ValueError(f"the response takes longer than {_WHOLE_SECONDS:.0f} s")
    return bytes(body)


def samples(text: str, names: Collection[str] | None = None) -> Iterator[ExpositionSample]:
    """The samples of an exposition. Other lines are left out.

    Args:
        text: the exposition.
        names: leave out all others.
    """
    for line in text.splitlines():
        if names is not None and line[: _name_end(line)] not in names:
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = _LABEL.findall(match[2] or "")
        yield ExpositionSample(match[1], {name: _unescaped(label) for name, label in labels}, value)


def _name_end(line: str) -> int:
    brace = line.find("{")
    return brace if brace >= 0 else line.find(" ")


def _unescaped(label: str) -> str:
    r"""A label's value: ``\\``, ``\"`` and ``\n`` stand for one character."""
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], label) if "\\" in label else label
