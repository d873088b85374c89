"""A remote object store on loopback: ``GET /<number>`` answers with an object, as late as it is told to.

Runs as a process of its own (`remote_store` starts and ends it), as a store is elsewhere and takes no time of the
training's interpreter. It waits asynchronously, so it hardly uses a core however many ask.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Behaviour:
    """How a store answers.

    Attributes:
        latency: seconds before the first byte; ``bytes_per_second``: of one connection after it, 0 for no limit.
        cold_every: every so many objects lie on slow storage and take ``cold_seconds`` (0 for none).
        silent_after: seconds after its first request, the store leaves one request unanswered for ``silent_seconds``.
    """

    object_bytes: int = 12288
    latency: float = 0.008
    bytes_per_second: float = 0.0
    cold_every: int = 0
    cold_seconds: float = 0.3
    silent_after: float = 0.0
    silent_seconds: float = 0.0


@dataclass
class Store:
    """Serves objects until it is killed."""

    behaviour: Behaviour
    first: float | None = None
    silenced: bool = False
    content: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.content = os.urandom(self.behaviour.object_bytes)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, kept alive."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                await self._wait(int(request.split(b" ", 2)[1].lstrip(b"/")))
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(self.content)}\r\n\r\n"
                writer.write(head.encode() + self.content)
                await writer.drain()
        writer.close()

    async def _wait(self, number: int) -> None:
        how, now = self.behaviour, time.monotonic()
        self.first = self.first or now
        if how.silent_seconds and not self.silenced and now - self.first > how.silent_after:
            self.silenced = True
            await asyncio.sleep(how.silent_seconds)
        cold = how.cold_every and number % how.cold_every == 0
        transfer = how.object_bytes / how.bytes_per_second if how.bytes_per_second else 0.0
        await asyncio.sleep(how.cold_seconds if cold else how.latency + transfer)


@contextlib.contextmanager
def remote_store(behaviour: Behaviour) -> Iterator[int]:
    """Start a store, give its port, end it."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(behaviour).items()]
    with subprocess.Popen([sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


class Client:
    """Fetches objects over one connection a process, opened when it is first needed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: http.client.HTTPConnection | None = None
        self._owner = 0

    def get(self, number: int) -> bytes:
        """The bytes of one object."""
        if self._connection is None or self._owner != os.getpid():
            self._connection, self._owner = http.client.HTTPConnection("127.0.0.1", self._port), os.getpid()
        self._connection.request("GET", f"/{number}")
        return self._connection.getresponse().read()


async def _main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in vars(Behaviour()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    store = Store(Behaviour(**vars(parser.parse_args())))
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
