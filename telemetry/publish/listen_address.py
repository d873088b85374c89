"""Turns the setting ``host`` into an address to listen on, and explains why one cannot be listened on.

Only a separate thread waits for a resolver.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any, Final

from telemetry.util.threads import OwnThread, Wake

PORTS_TRIED: Final = 64
"""If the port is taken, up to this many higher ports are tried."""


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address to listen on.

    Attributes:
        family: AF_INET or AF_INET6.
        host: the numeric address.
        rest: what follows the port in a socket address: nothing, or flow and scope of IPv6.
    """

    family: int
    host: str
    rest: tuple[Any, ...] = ()

    def at(self, port: int) -> tuple[Any, ...]:
        """The socket address with a port."""
        return (self.host, port, *self.rest)

    @property
    def is_any(self) -> bool:
        """Whether it means all addresses of this machine."""
        return ipaddress.ip_address(self.host.partition("%")[0]).is_unspecified


def numeric(host: str) -> Address | None:
    """The address of a numeric ``host`` or ``localhost``; None for any other name. Asks no resolver."""
    if host.lower() in {"localhost", "localhost."}:
        host = "127.0.0.1"
    try:
        return _first(host, socket.AI_NUMERICHOST)
    except OSError:
        return None


class Lookup:
    """A name that is being looked up. That can take minutes if the resolver does not answer, so it has its own thread.

    Args:
        name: name of a host.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._address: Address | None = None
        self._error: OSError | None = None
        self._done = Wake()
        OwnThread(self._run, name="telemetry-resolver").start()

    def wait(self, seconds: float) -> bool:
        """Wait at most this many seconds for the answer. Returns whether it has come."""
        return self._done.wait(max(0.0, seconds))

    def result(self) -> Address:
        """The answer; only once it is there.

        Raises:
            OSError: the name has no address.
        """
        if self._address is None:
            raise self._error or OSError(f"{self._name} has no address")
        return self._address

    def _run(self) -> None:
        try:
            self._address = _first(self._name, 0)
        except OSError as error:
            self._error = error
        finally:
            self._done.set()


def _first(host: str, flags: int) -> Address:
    """The first address of a name, one of IPv4 before those of IPv6.

    Raises:
        OSError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        raise socket.gaierror(socket.EAI_NONAME, "not a name of a host") from None
    usable = [each for each in found if each[0] in {socket.AF_INET, socket.AF_INET6}]
    if not usable:
        raise socket.gaierror(socket.EAI_NONAME, "no IP address")
    family, _, _, _, address = min(usable, key=lambda each: each[0] != socket.AF_INET)
    return Address(family, str(address[0]), tuple(address[2:]))


def explained(error: OSError, host: str, port: int) -> tuple[str, str]:
    """Why an address cannot be listened on, and what to do, in words.

    Args:
        error: the error of the attempt.
        host: the setting.
        port: the setting; 0 for any.
    """
    why = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        ports = f"every port from {port} to {min(65536, port + PORTS_TRIED) - 1}" if port else "every port"
        return f"{ports} is taken on {host}", "set port to another one, or to 0 for any"
    if error.errno == errno.EACCES:
        return f"port {port} may not be listened on ({why})", "set port to one above 1023"
    what = "be resolved" if isinstance(error, socket.gaierror) else "be listened on"
    return f"{host} cannot {what} ({why})", "set host to an address of this machine, such as 127.0.0.1 or 0.0.0.0"
