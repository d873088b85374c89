"""Makes the agent of a script hang: in a callback, a file system or a resolver, from `begin` to `end`."""

from __future__ import annotations

import os
import socket
import threading

from telemetry.safety.threads import named
from tests.faults.inside import agent

WAYS = ["all files", "file system", "resolver", "named host", "callback"]

armed, hanging, release = threading.Event(), threading.Event(), threading.Event()


def hang() -> None:
    hanging.set()
    release.wait()


def on_the_agent_thread(original):
    def call(*args, **more):
        if armed.is_set() and named(threading.get_ident()) == "telemetry-agent":
            hang()
        return original(*args, **more)

    return call


def resolving(original):
    def call(host, *args, **more):
        if named(threading.get_ident()) != "telemetry-resolver":
            return original(host, *args, **more)
        hang()
        return original("127.0.0.1", *args, **more)

    return call


def prepare(what: str) -> dict:
    """Before the start. Returns settings."""
    if what == "named host":
        socket.getaddrinfo = resolving(socket.getaddrinfo)
        return {"host": "a-name.invalid"}
    if what == "callback":
        return {"on_stall": lambda stall: armed.is_set() and hang()}
    if what == "resolver":
        socket.getaddrinfo = on_the_agent_thread(socket.getaddrinfo)
        socket.socket.bind = on_the_agent_thread(socket.socket.bind)
    else:
        for name in ("open", "stat", "rename", "replace", "write") if what == "all files" else ("write",):
            setattr(os, name, on_the_agent_thread(getattr(os, name)))
    return {}


def begin(what: str) -> None:
    """From now on the agent hangs, or will as soon as it gets there."""
    if what == "named host":
        return  # that hangs from the start
    release.clear()
    hanging.clear()
    armed.set()
    if what == "resolver" and agent()._node.endpoint is not None:
        os.close(agent()._node.endpoint._listening.number)  # so that it looks for a port again


def end() -> None:
    armed.clear()
    release.set()
