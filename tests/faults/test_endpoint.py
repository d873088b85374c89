"""The endpoint: its answers, bytes that are no request, and clients that misbehave."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import re
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from telemetry.node import server as module
from telemetry.node.board import Board, ServerLock
from telemetry.node.endpoint import NodeService
from telemetry.node.prometheus import Page, TargetFile
from telemetry.node.server import MAX_CONNECTIONS, Endpoint, HostNames, address_of
from telemetry.safety import threads
from telemetry.safety.errors import ErrorLog
from tests.faults.processes import HANG, Child, fetch, quiet, run, told, value, wait_for, write
from tests.free_ports import free_ports

PAGE = b'# HELP x X.\n# TYPE x gauge\nx{rank="0"} 1.0\n'
GOOD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Exposition:
    """Gives the same page at each scrape, or what ``make`` returns."""

    make = staticmethod(lambda: PAGE)

    def page(self, accept, accept_encoding):
        return Page("text/plain; version=0.0.4", "", self.make())


@contextlib.contextmanager
def serving():
    """An endpoint. Checks at the end that its thread has ended, and that it had no error."""
    errors = ErrorLog()
    names, lock = HostNames(["127.0.0.1", "the-node"]), ServerLock(Path(os.devnull))  # which nobody takes
    made = Endpoint(address_of("127.0.0.1", 0), [0], Exposition(), names, lock=lock, errors=errors)
    yield made
    made.close()
    assert not {"telemetry-endpoint", "telemetry-scrape"} & {*threads.running()}
    assert dict(errors.counts) == {}


@pytest.fixture
def endpoint(capfd):
    with serving() as made:
        yield made
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(module, "CONNECTION_SECONDS", 0.3)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)


@contextlib.contextmanager
def client(endpoint):
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=HANG) as connection:
        yield connection


def received(connection) -> bytes:
    """Everything that is received until the other side closes or resets the connection."""
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
        try:
            connection.sendall(request)
        except (ConnectionResetError, BrokenPipeError):
            pass  # the endpoint has closed the connection meanwhile
        return received(connection)


def status(answer: bytes) -> int:
    match = re.match(rb"HTTP/1\.0 (\d{3}) ", answer)
    assert match, answer[:200]
    return int(match[1])


def serves(endpoint) -> bool:
    answer = ask(endpoint, GOOD)
    return status(answer) == 200 and answer.endswith(b"\r\n\r\n" + PAGE)


# -- what is answered ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_line", "expected"),
    [
        ("GET /metrics HTTP/1.1", 200),
        ("GET /metrics?name[]=x HTTP/1.1", 200),
        ("GET /healthz HTTP/1.1", 200),
        ("GET / HTTP/1.1", 404),
        ("GET http://localhost/metrics HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 501),
        ("GET /a b c HTTP/1.1", 400),
    ],
)
def test_status(request_line, expected, endpoint):
    request = f"{request_line}\r\nX: a\tb\r\nHost: localhost\r\n\r\n".encode()
    answer = ask(endpoint, request * 3)  # of requests in a row one is answered
    assert (status(answer), answer.count(b"HTTP/1.0 ")) == (expected, 1)
    assert serves(endpoint)


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/nowhere"])
def test_head_is_get_without_the_body(path, endpoint):
    get, head = (
        ask(endpoint, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) for method in ("GET", "HEAD")
    )
    assert head == get.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("host", "expected"), [("the-node:9464", 200), ("localhost.evil.example", 403), ("\xff\xfe", 403), (None, 403)]
)
def test_a_page_that_rebinds_its_name_to_us_is_not_answered(host, expected, endpoint):
    header = b"" if host is None else b"Host: " + host.encode("latin-1") + b"\r\n"
    for path in (b"/metrics", b"/healthz"):
        assert status(ask(endpoint, b"GET " + path + b" HTTP/1.1\r\n" + header + b"\r\n")) == expected


def test_a_scraper_gets_the_format_and_the_encoding_that_it_accepts(tmp_path):
    source = """
        import telemetry, urllib.request
        from tests.faults.inside import tell
        agent = telemetry.start("run")
        found = []
        for headers in (
            {},
            {"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"},
            {"Accept-Encoding": "deflate, gzip;q=1.0"},
        ):
            answer = urllib.request.urlopen(urllib.request.Request(agent.metrics_url, headers=headers))
            body = answer.read()
            assert int(answer.headers["Content-Length"]) == len(body)
            found.append([answer.headers["Content-Type"], answer.headers["Content-Encoding"], body.decode("latin-1")])
        tell(found)
        """
    (kind, encoding, text), (open_kind, _, open_text), (_, zipped, packed) = run(tmp_path, source)
    assert (kind, encoding) == ("text/plain; version=0.0.4; charset=utf-8", None)
    assert open_kind.startswith("application/openmetrics-text; version=1.0.0")
    assert open_text.endswith("# EOF\n")
    assert "# UNIT training_time_seconds seconds\n" in open_text
    assert zipped == "gzip"
    unpacked = gzip.decompress(packed.encode("latin-1")).decode()
    assert unpacked.splitlines()[:3] == text.splitlines()[:3]
    assert unpacked.endswith("\n")


def test_an_error_of_ours_is_a_500_and_counted(endpoint, capfd):
    endpoint.exposition.make = lambda: 1 / 0
    answer = ask(endpoint, GOOD)
    assert status(answer) == 500
    assert b"division" not in answer
    assert endpoint.errors.counts.pop("endpoint") == 1
    del endpoint.exposition.make
    assert serves(endpoint)


# -- bytes that are no request -------------------------------------------------------------------------------------

GARBAGE = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    "binary": bytes(range(256)) + b"\r\n\r\n",
    "huge header": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    "many headers": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    "bad headers": b"GET /metrics HTTP/1.1\r\nHost localhost\r\n: \r\n \t\r\n\r\n",
    "HTTP/0.9": b"GET /metrics\r\n\r\n",
    "body": b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n" + b"x" * 100_000,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_harms_nobody(kind, endpoint, impatient):
    assert PAGE not in ask(endpoint, GARBAGE[kind])
    assert serves(endpoint)


# -- clients that misbehave ----------------------------------------------------------------------------------------


def test_silent_half_open_and_dripping_clients_are_ended(endpoint, impatient):
    """No client holds a connection past the deadline, and other clients are served meanwhile."""
    with contextlib.ExitStack() as stack:
        silent, half, drip, shut = (stack.enter_context(client(endpoint)) for _ in range(4))
        half.sendall(GOOD[:-20])
        shut.shutdown(socket.SHUT_WR)
        assert serves(endpoint)
        ended = threading.Event()

        def dripping():
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
    assert serves(endpoint)


def test_a_client_that_does_not_read_is_ended_and_a_slow_one_gets_all(endpoint, impatient):
    page = b"x 1.0\n" * 3_000_000
    endpoint.exposition.make = lambda: page
    with client(endpoint) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(GOOD)
        wait_for(lambda: len(endpoint.open) == 1, "it is asked")
        wait_for(lambda: not endpoint.open, "it is ended")
        assert ask(endpoint, GOOD).endswith(b"\r\n\r\n" + page)


def test_a_page_that_takes_longer_than_a_client_may_is_sent(endpoint, impatient):
    release = threading.Event()
    endpoint.exposition.make = lambda: release.wait(HANG) and PAGE
    with client(endpoint) as waiting, client(endpoint) as silent:
        waiting.sendall(GOOD)
        assert received(silent) == b"", "the deadline of a client has passed"
        release.set()
        assert received(waiting).endswith(PAGE)


def test_a_client_that_hangs_up_in_the_middle_of_the_answer(endpoint):
    release, asked = threading.Event(), threading.Event()

    def make():
        asked.set()
        release.wait(HANG)
        return b"x 1.0\n" * 1_000_000

    endpoint.exposition.make = make
    with client(endpoint) as connection:
        connection.sendall(GOOD)
        assert asked.wait(HANG), "it is being answered"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    release.set()
    del endpoint.exposition.make
    assert serves(endpoint)


def test_more_clients_than_the_cap_are_turned_away(endpoint, monkeypatch):
    monkeypatch.setattr(module, "CONNECTION_SECONDS", HANG)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(client(endpoint)) for _ in range(MAX_CONNECTIONS)]
        wait_for(lambda: len(endpoint.open) == MAX_CONNECTIONS, "the cap is reached")
        for _ in range(20):
            with client(endpoint) as connection:
                assert received(connection) == b"", "closed at once"
        silent[0].close()
        wait_for(lambda: len(endpoint.open) < MAX_CONNECTIONS, "one is free again")
        assert serves(endpoint)
        monkeypatch.setattr(module, "CONNECTION_SECONDS", 0.1)  # the deadline ends all of them
        for connection in silent[1:]:
            assert PAGE not in received(connection)
    assert serves(endpoint)


def test_closing_ends_what_is_open(endpoint):
    with client(endpoint) as silent, client(endpoint) as half:
        half.sendall(GOOD[:10])
        wait_for(lambda: len(endpoint.open) == 2, "both are connected")
        endpoint.close()
        for connection in (silent, half):
            assert received(connection) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=HANG)


# -- descriptors and threads -----------------------------------------------------------------------------------------


def test_programs_that_the_training_starts_inherit_no_socket(endpoint):
    with client(endpoint):
        wait_for(lambda: endpoint.open, "it is accepted")
        assert not any(each.get_inheritable() for each in (endpoint._socket, *endpoint.open))


FORKS = """
    import os, signal, socket, sys, threading, telemetry
    from tests.faults.inside import until
    agent, moment = telemetry.start("run"), sys.argv[1]
    there, forked = threading.Event(), threading.Event()
    def accept(listening, real=socket.socket.accept):
        accepted = real(listening)
        there.set()
        forked.wait(0.5)  # the fork is expected to wait for this
        return accepted
    if moment == "accept":
        socket.socket.accept = accept
    print(agent._node.port, flush=True)
    if moment != "accept":
        until(lambda: agent._node.endpoint.open)
    if moment == "stop":
        agent._wait_for_others = lambda: (there.set(), forked.wait())
        threading.Thread(target=telemetry.stop).start()
    if moment != "scrape":
        there.wait()
    if os.fork() == 0:
        sys.stdin.readline()
        os._exit(0)
    forked.set()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("moment", ["accept", "scrape", "stop"])
def test_a_forked_child_keeps_no_connection_open(moment, tmp_path):
    """The training forks while a slow client is connected, and is killed. The client sees the end; the child lives."""
    with Child(write(tmp_path, "forks.py", FORKS), moment, cwd=tmp_path, env=quiet()) as child:
        port = int(child.line())
        with socket.create_connection(("127.0.0.1", port), timeout=HANG / 6) as slow:
            slow.sendall(GOOD[:-2])
            assert received(slow) == b""
        child.process.stdin.close()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (socket.socket, "accept", OSError(errno.EMFILE, "Too many open files")),
        (threads, "start_new_thread", RuntimeError("can't start new thread")),
    ],
)
def test_without_a_descriptor_or_a_thread_it_is_tried_again_after_a_pause(owner, name, error, monkeypatch):
    """Poll reports a connection that cannot be accepted as ready again and again."""
    tried, real = [], getattr(owner, name)

    def failing(*arguments):
        tried.append(arguments)
        if len(tried) > 3:
            return real(*arguments)
        raise error

    with serving() as made:
        pauses = paused(monkeypatch)
        monkeypatch.setattr(owner, name, failing)
        while (before := len(tried)) < 3:
            with client(made):
                wait_for(lambda before=before: len(tried) > before, "it is tried")
        assert fetch(f"http://127.0.0.1:{made.port}/metrics") == PAGE.decode()
    assert len(pauses) >= 4, "after each"


def paused(monkeypatch) -> list[float]:
    """The pauses that the endpoint makes from now on."""
    pauses = []
    monkeypatch.setattr(module, "sleep", lambda seconds: pauses.append(seconds) or time.sleep(seconds))
    return pauses


def test_clients_that_ask_all_the_time_wait_for_one_another(endpoint, monkeypatch):
    pauses = paused(monkeypatch)
    for _ in range(20):
        assert serves(endpoint)
    assert pauses[:19] == [module._PAUSE_SECONDS] * 19, "one after each connection"


# -- the setting `host`: an unusable value delays nothing, and one message says what to do ---------------------------

S = 10**9


class Service:
    """A node's service with one rank, and a clock that is set by hand."""

    def __init__(self, folder, **settings) -> None:
        self.now = 1000 * S
        self.errors = ErrorLog(lambda: self.now)
        self.targets = TargetFile(folder / "targets", "r", "n")
        self.board = Board("r", "scope", "n", root=folder / "boards")
        self.service = NodeService(
            self.board,
            self.targets,
            **({"run": "r", "port": 0, "node": "n"} | settings),
            errors=self.errors,
            mono_ns=lambda: self.now,
        )

    def told(self) -> list[str]:
        """The messages for the user since the last call."""
        return [note.message for note in self.errors.take_notes()]

    def tick(self, seconds: float = 1.0) -> str:
        """Call it once. Returns what it raised, as text."""
        self.now += int(seconds * S)
        try:
            self.service.lead_if_vacant()
        except OSError as error:
            return str(error)
        return ""


@pytest.fixture
def service(tmp_path):
    made = []

    def make(**settings):
        made.append(Service(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.service.leave()


@pytest.fixture
def lookups(monkeypatch):
    """A fake resolver: the answer for each name. By default a name does not exist."""
    asked: list[str] = []
    answers: dict[str, object] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host, port, *args, flags=0, **kwargs):
        try:
            return real(host, port, *args, flags=flags | socket.AI_NUMERICHOST, **kwargs)
        except socket.gaierror:
            if flags & socket.AI_NUMERICHOST:
                raise
        asked.append(host)
        answer = answers.get(host)
        if isinstance(answer, threading.Event):
            answer.wait(60)
        elif isinstance(answer, str):
            return real(answer, port, *args, flags=socket.AI_NUMERICHOST, **kwargs)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield asked, answers
    wait_for(lambda: "telemetry-resolver" not in threads.running(), "its thread is gone")


@pytest.fixture
def binds(monkeypatch):
    """The addresses that were tried."""
    tried: list[tuple] = []
    real = socket.socket.bind

    def bind(self, where):
        tried.append(where)
        return real(self, where)

    monkeypatch.setattr(module.socket.socket, "bind", bind)
    return tried


def test_an_address_that_is_not_ours_is_tried_once_and_then_rarely(service, binds):
    one = service(host="192.0.2.1", port=9464)
    said = [one.tick() for _ in range(300)]
    assert [text for text in said if text] == [said[0]]
    assert "192.0.2.1 cannot be listened on (Cannot assign requested address)" in said[0]
    assert "set host to an address of this machine, such as 127.0.0.1" in said[0]
    assert one.told() == []
    assert {port for _, port in binds} == {9464}, "another port would fail alike"
    assert len(binds) <= 31, "every 10 s"


def test_a_name_nobody_knows_is_asked_for_once_at_a_time(service, lookups):
    asked, _ = lookups
    one = service(host="no-such-host.invalid")
    said = []
    for _ in range(100):
        said.append(one.tick())
        wait_for(lambda: "telemetry-resolver" not in threads.running(), "the resolver has answered")
    told = {text for text in said if text}
    assert any("no-such-host.invalid cannot be resolved (Name or service not known)" in text for text in told)
    assert all("set host to an address of this machine" in text for text in told)
    assert len(told) == len([text for text in said if text]) <= 2, "each is told once"
    assert 2 <= len(asked) <= 11


def test_a_name_is_served_at_its_address_and_asked_for_once(service, lookups):
    asked, answers = lookups
    answers["node-a.example"] = "127.0.0.2"
    one = service(host="node-a.example")
    one.tick(0)
    assert asked == ["node-a.example"]
    wait_for(lambda: one.tick() or one.service.endpoint, "it serves")
    assert "x" not in fetch(f"http://127.0.0.2:{one.service.port}/metrics")
    assert asked == ["node-a.example"]
    (target,) = json.loads(one.targets.path.read_text())[0]["targets"]
    assert target == f"node-a.example:{one.service.port}"


def test_a_silent_resolver_is_waited_for_on_a_thread_of_its_own(service, lookups):
    asked, answers = lookups
    answers["slow.example"] = release = threading.Event()
    one = service(host="slow.example")
    try:
        said = [one.tick() for _ in range(100)]
        assert one.service.trouble == "slow.example cannot be resolved (the resolver has not answered yet)"
        wait_for(lambda: asked, "the resolver is asked")
        assert asked == ["slow.example"]
        assert [text for text in said if text] == [said[0]]
        assert "set host to an address of this machine" in said[0]
    finally:
        release.set()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "LOCALHOST", "0.0.0.0", "::"])  # noqa: S104
def test_an_address_needs_no_resolver(host, service, lookups):
    asked, _ = lookups
    one = service(host=host)
    assert one.tick() == ""
    assert one.service.endpoint is not None
    assert asked == []


def test_a_port_that_another_program_has(tmp_path):
    port = free_ports()
    source = """
        import telemetry
        from tests.faults.inside import agent, page, tell
        telemetry.start("run")
        (target,) = agent().run_dir.glob("targets/*.json")
        tell([agent().metrics_url, target.read_text(), page()])
        telemetry.stop()
        """
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        url, target, page = run(tmp_path, source, env=quiet(TELEMETRY_PORT=str(port)))
    found = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/metrics", url)[1])
    assert port < found <= port + 63
    assert json.loads(target)[0]["targets"] == [f"127.0.0.1:{found}"]
    assert told(tmp_path / "run", "endpoint") == [f"port {port} is taken; the metrics of this run are at port {found}"]
    assert value(page, "telemetry_errors_total", source="endpoint") is None, "a notice is no error"


@pytest.fixture
def etc(tmp_path):
    (tmp_path / "hosts").write_text("127.0.0.1 localhost evil.alias\n10.0.0.7 n1.dc.example n1 n1-ib # n1.comment\n")
    (tmp_path / "resolv.conf").write_text("nameserver 10.0.0.1\nsearch dc2.example. cluster.local\n")
    return tmp_path


@pytest.mark.parametrize(
    ("header", "known"),
    [
        ("n1", True),
        ("N1.:9464", True),
        ("n1.dc.example", True),
        ("n1.dc2.example", True),
        ("n1.cluster.local", True),
        ("metrics.example:80", True),
        ("10.9.8.7", True),
        ("::1", True),
        ("[fe80::1%eth0]:9464", True),
        ("LocalHost:9464", True),
        ("[::1]evil", False),
        ("localhost.evil.example", False),
        ("2130706433", False),
        ("a" * 2000, False),
        ("n1.evil.com", False),
        ("evil.n1", False),
        ("evil-n1.dc.example", False),
        ("n1.comment", False),
        ("evil.alias", False),
        ("[n1]", False),
        ("[::1", False),
        ("n1:port", False),
        ("", False),
    ],
)
def test_names_of_a_node_are_exact(header, known, etc):
    assert HostNames(["metrics.example", "n1"], etc).knows(header) is known
