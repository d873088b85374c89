"""Requests to the endpoint: the answers, and bytes that are not a request."""

from __future__ import annotations

import re

import pytest

from telemetry.publish import http_server as module
from telemetry.publish.board import RankState
from telemetry.publish.exposition import CONTENT_TYPE
from tests.faults.http_clients import GOOD, PAGE, STATE, ask, client, received, serves, serving, shorten_deadlines


@pytest.fixture
def endpoint():
    with serving() as made:
        yield made


@pytest.fixture
def impatient(monkeypatch):
    shorten_deadlines(monkeypatch)


def status(answer: bytes) -> int:
    # To a client with an unknown version it answers as in HTTP/0.9, which has no status line.
    match = re.match(rb"HTTP/1\.0 (\d{3}) ", answer) or re.search(rb"Error code: (\d{3})", answer)
    assert match, answer[:200]
    return int(match[1])


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


@pytest.mark.parametrize(
    "extra",
    [
        b"X: a\tb\r\n",
        b"Host: localhost\r\n",
        b"X: y\r\n z\r\n",
        b"Expect: 100-continue\r\n",
        b"X y: z\r\n",
        b"X: \xff\r\n",
    ],
)
def test_what_is_not_plain_gets_what_the_standard_handler_says(extra, endpoint, monkeypatch):
    """Plain requests are answered in a short way. It must not take requests that need another answer."""
    request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + extra + b"\r\n"
    fast = ask(endpoint, request)
    monkeypatch.setattr(module, "plain_request", lambda _: None)
    assert without_date(ask(endpoint, request)) == without_date(fast)


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/nowhere", "/metrics?name[]=x", "//metrics"])
@pytest.mark.parametrize("host", ["localhost", "evil.example", " localhost", "localhost "])
def test_a_plain_request_gets_what_the_standard_handler_says(path, host, endpoint, monkeypatch):
    head = f"GET {path} HTTP/1.1\r\nUser-Agent: Prometheus/3.0\r\nhost: {host}\r\nAccept: */*\r\n\r\n".encode()
    assert module.plain_request(head) is not None
    fast = ask(endpoint, head)
    monkeypatch.setattr(module, "plain_request", lambda _: None)
    assert without_date(ask(endpoint, head)) == without_date(fast)


def without_date(answer: bytes) -> bytes:
    return re.sub(rb"Date: [^\r]+\r\n", b"", answer)


def test_the_answer_has_what_a_scraper_needs(endpoint):
    head, _, body = ask(endpoint, GOOD).partition(b"\r\n\r\n")
    assert body == PAGE
    assert f"Content-Type: {CONTENT_TYPE}".encode() in head
    assert f"Content-Length: {len(PAGE)}".encode() in head
    assert b"X-Content-Type-Options: nosniff" in head


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/nowhere"])
def test_head_is_get_without_the_body(path, endpoint):
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


def test_a_page_is_joined_anew_only_when_a_rank_has_published(endpoint):
    def page():
        return endpoint.answer("GET", "/metrics", "127.0.0.1").body

    states = [STATE]
    endpoint._states = lambda: [*states]
    first = page()
    assert page() is first
    states[0] = RankState(0, 1, ((STATE.families[0][0], b'x{rank="0"} 2.0\n'),))
    assert page().endswith(b"2.0\n")
    states.append(RankState(1, 2, ((STATE.families[0][0], b'x{rank="1"} 3.0\n'),)))
    assert page().endswith(b'2.0\nx{rank="1"} 3.0\n')
    states.pop()
    assert page().endswith(b"2.0\n")


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
            pass  # the endpoint has closed the connection meanwhile
        answer = received(connection)
    assert PAGE not in answer
    assert serves(endpoint)
    assert capfd.readouterr() == ("", "")


def test_of_requests_in_a_row_one_is_answered(endpoint):
    answer = ask(endpoint, GOOD * 5)
    assert answer.count(b"HTTP/1.0 200 OK") == 1
    assert answer.endswith(PAGE)
    keep = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n\r\n"
    assert ask(endpoint, keep * 2).count(b"HTTP/1.0") == 1


def test_an_error_of_ours_is_a_500_and_counted(endpoint, capfd):
    errors = []
    endpoint._states, endpoint._on_error = lambda: 1 / 0, errors.append
    answer = ask(endpoint, GOOD)
    assert status(answer) == 500
    assert b"division" not in answer
    assert b"Traceback" not in answer
    assert [type(error) for error in errors] == [ZeroDivisionError]
    endpoint._states = lambda: [STATE]
    assert serves(endpoint)
    assert capfd.readouterr() == ("", "")
