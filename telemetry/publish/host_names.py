"""Decides which names in a Host header mean this node. Only exact names: a web page may rebind its own name to us."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.util.files import read_small

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_BYTES: Final = 1 << 16


class HostNames:
    """The names by which a request may address this node: the node's names, localhost, and any IP address.

    The node's full name counts, too. A resolver may not answer, so the full name comes from files: the names beside the
    short name in /etc/hosts, and the search domains of /etc/resolv.conf.

    Args:
        given: the configured host and the node's name.
        etc: the folder of ``hosts`` and ``resolv.conf``.
    """

    def __init__(self, given: Iterable[str], etc: Path = Path("/etc")) -> None:
        self._etc = etc
        self._names = {_plain(name) for name in (*given, "localhost", socket.gethostname())} - {""}
        self._complete = False
        self._newest: str | None = None  # the newest header that names this node: a scraper sends the same each time

    def knows(self, header: str) -> bool:
        """Whether a Host header names this node."""
        if header == self._newest:
            return True
        known = self._names_us(header)
        if known:
            self._newest = header
        return known

    def _names_us(self, header: str) -> bool:
        name = _name_of(header)
        if name is None:
            return False
        if name in self._names or _is_address(name):
            return True
        if not self._complete and any(name.partition(".")[0] == own.partition(".")[0] for own in self._names):
            self._names |= self._from_files()
            self._complete = True
        return name in self._names

    def _from_files(self) -> set[str]:
        """The node's names with its domains, and its short name if the full one is known."""
        own = {name for name in self._names if name != "localhost" and not _is_address(name)}
        own |= {name.partition(".")[0] for name in own}
        found = set(own)
        for line in self._lines("hosts"):
            names = {_plain(word) for word in line.split("#")[0].split()[1:]}
            found |= {name for name in names if name in own or name.partition(".")[0] in own} if names & own else set()
        for line in self._lines("resolv.conf"):
            words = line.split()
            if words[:1] in (["search"], ["domain"]):
                found |= {f"{name}.{_plain(domain)}" for name in own for domain in words[1:] if _plain(domain)}
        return found

    def _lines(self, file: str) -> list[str]:
        try:
            # Not `read_small` on the path itself, because both files may be links.
            return read_small((self._etc / file).resolve(), _MAX_BYTES).decode("ascii", "replace").splitlines()
        except (OSError, RuntimeError):
            return []


def _plain(name: str) -> str:
    """A name in the form for comparison: lower case, without a trailing dot."""
    return name.strip().lower().removesuffix(".")


def _name_of(header: str) -> str | None:
    """The name in ``name``, ``name:port``, ``[address]`` or ``[address]:port``; None for anything else."""
    text = header.strip()
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        if not bracket or not _is_address(name.lower()) or (port and not port.startswith(":")):
            return None
        port = port[1:]
    elif text.count(":") > 1:
        name, port = text, ""  # an IPv6 address without its brackets
    else:
        name, _, port = text.partition(":")
    return _plain(name) if not port or (port.isascii() and port.isdigit()) else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
