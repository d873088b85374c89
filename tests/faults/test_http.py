"""Clients that misbehave: the endpoint keeps serving the others, and its threads stay few."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time

import pytest

from faults.processes import HANG, wait_for
from telemetry.publish import endpoint as module
from telemetry.publish.board import RankState
from telemetry.publish.endpoint import MAX_CONNECTIONS, Endpoint
from telemetry.publish.exposition import CONTENT_TYPE

STATE = RankState(0, 1, ((b"# HELP x X.\n# TYPE x gauge\n", b'x{rank="0"} 1.0\n'),))
PAGE = b'# HELP x X.\n# TYPE x gauge\nx{rank="0"} 1.0\n'
GOOD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def endpoint():
    before = threading.active_count()
    made = Endpoint("127.0.0.1", [0], lambda: [STATE], "the-node", CONTENT_TYPE)
    yield made
    made.close()
    wait_for(lambda: threading.active_count() <= before, "its threads are gone")


@pytest.fixture
def impatient(monkeypatch):
    """The deadline of a connection, shortened."""
    monkeypatch.setattr(module, "CONNECTION_SECONDS", 0.3)
    monkeypatch.setattr(module._Handler, "timeout", 0.3)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)


@contextlib.contextmanager
def client(endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=HANG) as connection:
        yield connection


def received(connection) -> bytes:
    """All that comes until the other side closes. A reset is the end too."""
    parts = []
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def ask(endpoint, request: bytes) -> bytes:
    with client(endpoint) as connection:
        connection.sendall(request)
        return received(connection)


def status(answer: bytes) -> int:
    # To who speaks no known version it answers as in HTTP/0.9, which has no status line.
    match = re.match(rb"HTTP/1\.0 (\d{3}) ", answer) or re.search(rb"Error code: (\d{3})", answer)
    assert match, answer[:200]
    return int(match[1])


def serves(endpoint) -> bool:
    answer = ask(endpoint, GOOD)
    return answer.startswith(b"HTTP/1.0 200 ") and answer.endswith(b"\r\n\r\n" + PAGE)


def handlers() -> int:
    names = ("process_request_thread", "_send_rest")
    return sum(any(name in thread.name for name in names) for thread in threading.enumerate())


# -- what is answered --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_line", "expected"),
    [
        ("GET /metrics HTTP/1.1", 200),
        ("GET /metrics HTTP/1.0", 200),
        ("GET /metrics?name[]=x HTTP/1.1", 200),
        ("GET /healthz HTTP/1.1", 200),
        ("GET / HTTP/1.1", 404),
        ("GET /metrics/ HTTP/1.1", 404),
        ("GET /metrics/../healthz HTTP/1.1", 404),
        ("GET //metrics HTTP/1.1", 404),
        ("GET /%6detrics HTTP/1.1", 404),
        ("GET http://localhost/metrics HTTP/1.1", 404),
        ("GET /../../etc/passwd HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("PUT /metrics HTTP/1.1", 405),
        ("PATCH /metrics HTTP/1.1", 405),
        ("DELETE /metrics HTTP/1.1", 405),
        ("OPTIONS /metrics HTTP/1.1", 405),
        ("TRACE /metrics HTTP/1.1", 501),
        ("CONNECT localhost:80 HTTP/1.1", 501),
        ("get /metrics HTTP/1.1", 501),
        ("BREW /metrics HTTP/1.1", 501),
        ("GET /metrics HTTP/3.0", 505),
        ("GET /metrics HTTP/1.x", 400),
        ("GET", 400),
        ("GET /a b c HTTP/1.1", 400),
    ],
)
def test_status(request_line, expected, endpoint, capfd):
    answer = ask(endpoint, f"{request_line}\r\nHost: localhost\r\n\r\n".encode())
    assert status(answer) == expected
    if expected == 405:
        assert b"\r\nAllow: GET, HEAD\r\n" in answer
    assert b"Python" not in answer, "the server's version is nobody's business"
    assert serves(endpoint)
    assert capfd.readouterr() == ("", "")


def test_the_answer_has_what_a_scraper_needs(endpoint):
    head, _, body = ask(endpoint, GOOD).partition(b"\r\n\r\n")
    assert body == PAGE
    assert f"Content-Type: {CONTENT_TYPE}".encode() in head
    assert f"Content-Length: {len(PAGE)}".encode() in head
    assert b"X-Content-Type-Options: nosniff" in head


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/nowhere"])
def test_head_is_get_without_the_body(path, endpoint):
    def without_date(answer):
        return re.sub(rb"Date: [^\r]+\r\n", b"", answer)

    get = ask(endpoint, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = ask(endpoint, f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert without_date(head) == without_date(get.partition(b"\r\n\r\n")[0]) + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("LocalHost:9464", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1:9464", 200),
        ("10.1.2.3:9464", 200),
        ("[::1]:9464", 200),
        ("::1", 200),
        ("the-node", 200),
        ("the-node:9464", 200),
        ("The-Node.:9464", 200),
        ("the-node.evil.example", 403),
        ("the-node:evil", 403),
        ("[::1", 403),
        ("[::1]evil", 403),
        ("[the-node]", 403),
        ("evil.example", 403),
        ("evil.example:9464", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("the-node-evil.example", 403),
        ("0x7f000001", 403),
        ("2130706433", 403),
        ("", 403),
        (None, 403),
        ("\xff\xfe", 403),
        ("[", 403),
        ("a" * 2000, 403),
    ],
)
def test_a_page_that_rebinds_its_name_to_us_is_not_answered(host, expected, endpoint):
    header = b"" if host is None else b"Host: " + host.encode("latin-1") + b"\r\n"
    for path in (b"/metrics", b"/healthz"):
        answer = ask(endpoint, b"GET " + path + b" HTTP/1.1\r\n" + header + b"\r\n")
        assert status(answer) == expected
        if expected == 403:
            assert PAGE not in answer
    assert endpoint.failures == 0


# -- bytes that are no request -----------------------------------------------------------------------------------

TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2

GARBAGE = {
    "tls": TLS_HELLO,
    "zeros": b"\0" * 4096 + b"\r\n\r\n",
    "newlines": b"\r\n" * 1000,
    "binary": bytes(range(256)) + b"\r\n\r\n",
    "huge line": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "huge header": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    "many headers": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 500 + b"\r\n",
    "bad headers": b"GET /metrics HTTP/1.1\r\nHost localhost\r\n: \r\n \t\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "format": b"GET /%s%n{0} HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "injection": b"GET /metrics\r\nX: y HTTP/1.1\r\n\r\n",
    "body": b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n" + b"x" * 100_000,
    "chunked": b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\nx",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_harms_nobody(kind, endpoint, impatient, capfd):
    with client(endpoint) as connection:
        try:
            connection.sendall(GARBAGE[kind])
        except (ConnectionResetError, BrokenPipeError):
            pass  # it has hung up on us in the middle of it
        answer = received(connection)
    assert PAGE not in answer
    assert endpoint.failures == 0
    assert serves(endpoint)
    assert capfd.readouterr() == ("", "")


def test_of_requests_in_a_row_one_is_answered(endpoint):
    answer = ask(endpoint, GOOD * 5)
    assert answer.count(b"HTTP/1.0 200 OK") == 1
    assert answer.endswith(PAGE)
    keep = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n"
    assert ask(endpoint, keep * 2).count(b"HTTP/1.0") == 1


def test_an_error_of_ours_is_a_500_and_counted(endpoint, capfd):
    endpoint._states = lambda: 1 / 0
    answer = ask(endpoint, GOOD)
    assert status(answer) == 500
    assert b"division" not in answer
    assert b"Traceback" not in answer
    assert endpoint.failures == 1
    endpoint._states = lambda: [STATE]
    assert serves(endpoint)
    assert capfd.readouterr() == ("", "")


# -- clients that take their time --------------------------------------------------------------------------------


def test_silent_half_open_and_dripping_clients_are_ended(endpoint, impatient, capfd):
    """None of them holds a thread past the deadline, and the others are served meanwhile."""
    with contextlib.ExitStack() as stack:
        silent, half, drip, shut = (stack.enter_context(client(endpoint)) for _ in range(4))
        half.sendall(GOOD[:-2])
        shut.shutdown(socket.SHUT_WR)
        wait_for(lambda: handlers() >= 3, "they have their threads")
        assert serves(endpoint)

        ended = threading.Event()

        def dripping():  # a byte at a time, so that no single read times out
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
    monkeypatch.setattr(module, "_REQUEST_SECONDS", HANG)  # however slow this machine is
    started, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread.name), start(thread)))
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
        monkeypatch.setattr(module, "CONNECTION_SECONDS", 0.1)  # the deadline comes, and ends all of them
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
    assert most <= 2 * MAX_CONNECTIONS  # some are about to end
    assert endpoint.failures == 0
    assert capfd.readouterr() == ("", "")


def test_a_machine_without_threads_to_give_turns_clients_away(endpoint, monkeypatch, capfd):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_REQUEST_SECONDS", HANG)  # however slow this machine is
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(MAX_CONNECTIONS + 2):
            with client(endpoint) as connection:
                connection.sendall(GOOD[:-2])
                assert received(connection) == b""
        assert serves(endpoint)  # a request that comes at once takes none
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
        assert not made._thread.is_alive() or made._thread.join(HANG) is None
        for connection in (silent, half):
            assert received(connection) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", made.port), timeout=HANG)
    wait_for(lambda: handlers() == 0, "no thread is left")
    assert capfd.readouterr() == ("", "")
