"""The request of a scraper, and the answer to it, as text.

The handler of the standard library parses a request with the parser for mail. On a cold cache that holds the GIL for
half a millisecond. Requests of Prometheus, curl and browsers are recognised here. All others go to that handler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from telemetry.util.clock import unix_time

SERVER: Final = "telemetry"
PLAIN_TEXT: Final = "text/plain; charset=utf-8"

_REQUEST: Final = re.compile(
    rb"(GET|HEAD) (/[!-~]*) HTTP/1\.[01]\r\n"
    rb"((?:[A-Za-z0-9-]{1,64}:[ -~]*\r\n){0,50})\r\n",
)
_HOST: Final = re.compile(rb"(?:^|\n)host:[ ]*([^\r]*)", re.IGNORECASE)
_EXPECT: Final = re.compile(rb"(?:^|\n)expect:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The answer to a request."""

    status: int
    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """A request without special features. ``host`` is empty unless there is exactly one such header."""

    method: str
    path: str
    host: str


def plain_request(head: bytes) -> PlainRequest | None:
    """Parse a request; None if it is not a plain one."""
    found = _REQUEST.match(head)
    if found is None or _EXPECT.search(found[3]):
        return None
    hosts = _HOST.findall(found[3])
    host = hosts[0].decode("ascii") if len(hosts) == 1 else ""
    return PlainRequest(found[1].decode(), found[2].decode("ascii").partition("?")[0], host)


def as_http(answer: HttpAnswer, *, with_body: bool) -> bytes:
    """An answer as HTTP/1.0 text. The connection is closed after it."""
    head = (
        f"HTTP/1.0 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
        f"Server: {SERVER}\r\n"
        f"Date: {formatdate(unix_time(), usegmt=True)}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "X-Content-Type-Options: nosniff\r\n\r\n"
    ).encode()
    return head + answer.body if with_body else head
