"""Clients that misbehave: the endpoint keeps serving the others, and its threads stay few."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import pytest

from faults.processes import HANG, wait_for
from telemetry.publish import http_server as module
from telemetry.publish.board import RankState
from telemetry.publish.endpoint import Endpoint
from telemetry.publish.exposition import CONTENT_TYPE
from telemetry.publish.http_server import MAX_CONNECTIONS
from telemetry.util import threads
from tests.faults.http_clients import GOOD, PAGE, STATE, ask, client, received, serves, serving, shorten_deadlines


@pytest.fixture
def endpoint():
    with serving() as made:
        yield made


@pytest.fixture
def impatient(monkeypatch):
    shorten_deadlines(monkeypatch)


def handlers() -> int:
    return threads.running().count("telemetry-request")


# -- clients that take their time --------------------------------------------------------------------------------


def test_silent_half_open_and_dripping_clients_are_ended(endpoint, impatient, capfd):
    """No client holds a thread past the deadline, and other clients are served meanwhile."""
    with contextlib.ExitStack() as stack:
        silent, half, drip, shut = (stack.enter_context(client(endpoint)) for _ in range(4))
        half.sendall(GOOD[:-2])
        shut.shutdown(socket.SHUT_WR)
        wait_for(lambda: handlers() >= 3, "they have their threads")
        assert serves(endpoint)

        ended = threading.Event()

        def dripping():  # one byte at a time, so that no single read times out
            for byte in b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 10_000:
                try:
                    drip.sendall(bytes([byte]))
                except OSError:
                    break
                if ended.wait(0.05):
                    break

        thread = threading.Thread(target=dripping)
        thread.start()
        for connection in (silent, half, drip, shut):
            assert PAGE not in received(connection), "its end came"
        ended.set()
        thread.join(HANG)
        wait_for(lambda: handlers() == 0, "no thread is left")
    assert serves(endpoint)
    assert capfd.readouterr() == ("", "")


def test_a_client_that_does_not_read_is_ended(endpoint, impatient, capfd):
    endpoint._states = lambda: [RankState(0, 1, ((b"# HELP x X.\n", b"x 1.0\n" * 3_000_000),))]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", endpoint.port))
        connection.sendall(GOOD)
        wait_for(lambda: handlers() == 1, "it is being answered")
        endpoint._states = lambda: [STATE]
        assert serves(endpoint)
        wait_for(lambda: handlers() == 0, "its thread is gone")
    assert capfd.readouterr() == ("", "")


def test_an_answer_that_is_not_taken_at_once_comes_whole(endpoint):
    page = b"x 1.0\n" * 3_000_000
    endpoint._states = lambda: [RankState(0, 1, ((b"# HELP x X.\n", page),))]
    with client(endpoint) as connection:
        connection.sendall(GOOD)
        wait_for(lambda: handlers() == 1, "the rest of it has a thread")
        assert received(connection).endswith(b"\r\n\r\n# HELP x X.\n" + page)


def test_a_request_that_is_there_at_once_gets_no_thread(endpoint, monkeypatch):
    monkeypatch.setattr(module, "_REQUEST_SECONDS", HANG)  # so that a slow machine does not matter
    started, start = [], threads.start_new_thread
    monkeypatch.setattr(
        threads, "start_new_thread", lambda main, arguments: (started.append(main), start(main, arguments))
    )
    assert serves(endpoint)
    assert serves(endpoint)
    assert started == []


def test_a_client_that_hangs_up_in_the_middle_of_the_answer(endpoint, capfd):
    release, asked = threading.Event(), threading.Semaphore(0)

    def states():
        asked.release()
        release.wait(HANG)
        return [RankState(0, 1, ((b"# HELP x X.\n", b"x 1.0\n" * 1_000_000),))]

    endpoint._states = states
    for number in range(3):
        with client(endpoint) as connection:
            connection.sendall(GOOD[:-2])
            wait_for(lambda number=number: handlers() == number + 1, "it has a thread")
            connection.sendall(GOOD[-2:])
            assert asked.acquire(timeout=HANG), "it is being answered"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    release.set()
    wait_for(lambda: handlers() == 0, "their threads are gone")
    endpoint._states = lambda: [STATE]
    assert serves(endpoint)
    assert capfd.readouterr() == ("", "")


def test_more_clients_than_the_cap_get_no_thread(endpoint, monkeypatch, capfd):
    most = 0
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(client(endpoint)) for _ in range(MAX_CONNECTIONS)]
        wait_for(lambda: handlers() == MAX_CONNECTIONS, "the cap is reached")
        for _ in range(20):
            with client(endpoint) as connection:
                assert received(connection) == b"", "closed at once"
            most = max(most, handlers())
        assert most == MAX_CONNECTIONS
        silent[0].close()
        wait_for(lambda: handlers() < MAX_CONNECTIONS, "one is free again")
        assert serves(endpoint)
        monkeypatch.setattr(module, "CONNECTION_SECONDS", 0.1)  # the deadline ends all of them
        for connection in silent[1:]:
            assert PAGE not in received(connection)
    wait_for(lambda: handlers() == 0, "no thread is left")
    assert serves(endpoint)
    assert capfd.readouterr() == ("", "")


def test_a_crowd_of_scrapers_is_served_or_turned_away(endpoint, capfd):
    answers: list[bytes] = []

    def scrape():
        for _ in range(10):
            try:
                answers.append(ask(endpoint, GOOD))
            except OSError:
                answers.append(b"")

    crowd = [threading.Thread(target=scrape) for _ in range(12)]
    for thread in crowd:
        thread.start()
    deadline = time.monotonic() + HANG
    most = 0
    while any(thread.is_alive() for thread in crowd):
        most = max(most, handlers())
        assert time.monotonic() < deadline, "the crowd is not served"
        time.sleep(0.005)
    assert all(answer == b"" or answer.endswith(PAGE) for answer in answers)
    assert sum(answer.endswith(PAGE) for answer in answers) >= 10
    assert most <= 2 * MAX_CONNECTIONS  # some of these are about to end
    assert capfd.readouterr() == ("", "")


def test_a_machine_without_threads_to_give_turns_clients_away(endpoint, monkeypatch, capfd):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_REQUEST_SECONDS", HANG)  # so that a slow machine does not matter
        patch.setattr(threads, "start_new_thread", refuse)
        for _ in range(MAX_CONNECTIONS + 2):
            with client(endpoint) as connection:
                connection.sendall(GOOD[:-2])
                assert received(connection) == b""
        assert serves(endpoint)  # a request that has arrived at once needs no thread
    assert serves(endpoint)
    assert capfd.readouterr() == ("", "")


def test_a_default_timeout_of_the_script_s_changes_nothing(capfd):
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.001)
    try:
        made = Endpoint("127.0.0.1", [0], lambda: [STATE], "the-node", CONTENT_TYPE)
    finally:
        socket.setdefaulttimeout(before)
    try:
        assert serves(made)
    finally:
        made.close()
    assert capfd.readouterr() == ("", "")


def test_closing_ends_what_is_open(capfd):
    made = Endpoint("127.0.0.1", [0], lambda: [STATE], "the-node", CONTENT_TYPE)
    with client(made) as silent, client(made) as half:
        half.sendall(GOOD[:10])
        wait_for(lambda: handlers() == 2, "both are connected")
        made.close()
        assert made._thread.join(HANG)
        for connection in (silent, half):
            assert received(connection) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", made.port), timeout=HANG)
    wait_for(lambda: handlers() == 0, "no thread is left")
    assert capfd.readouterr() == ("", "")
