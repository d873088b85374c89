"""The setting ``host``: an unusable value delays nothing, and one message says what to do."""

from __future__ import annotations

import errno
import json
import socket
import threading

import pytest

from faults.processes import environment, events, fetch, results, run_script, value, wait_for
from telemetry.node import endpoint as module
from telemetry.node.board import Board
from telemetry.node.endpoint import HostNames, NodeService
from telemetry.node.prometheus import TargetFile
from telemetry.util import threads
from telemetry.util.errors import ErrorLog

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
        return [line["message"] for line in self.errors.take_lines()]

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
    assert 5 <= len(binds) <= 11, "after 1, 2, 4 ... seconds, and at last once a minute"


def test_a_name_nobody_knows_is_asked_for_once_at_a_time(service, lookups):
    asked, _ = lookups
    one = service(host="no-such-host.invalid")
    said = []
    for _ in range(100):
        said.append(one.tick())
        if one.service._lookup is not None:
            assert one.service._lookup.wait(60)
    (told,) = [text for text in said if text]
    assert "no-such-host.invalid cannot be resolved (Name or service not known)" in told
    assert "set host to an address of this machine" in told
    assert asked == ["no-such-host.invalid"] * len(asked)
    assert len(asked) <= 8


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
        for _ in range(20):
            assert one.tick() == ""
            assert one.service.trouble == "the name slow.example is still being looked up"
        wait_for(lambda: asked, "the resolver is asked")
        assert asked == ["slow.example"]
        (told,) = one.told()
        assert told.endswith("set host to an address instead of a name")
    finally:
        release.set()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "LOCALHOST", "0.0.0.0", "::"])  # noqa: S104
def test_an_address_needs_no_resolver(host, service, lookups):
    asked, _ = lookups
    one = service(host=host)
    assert one.tick() == ""
    assert one.service.endpoint is not None
    assert asked == []


def test_only_a_port_that_is_taken_leads_to_the_next(service, monkeypatch):
    tried = []

    def bind(_, where):
        tried.append(where[1])
        raise OSError(errno.EADDRINUSE if where[1] < 9466 else errno.EACCES, "refused")

    monkeypatch.setattr(module.socket.socket, "bind", bind)
    assert "refused" in service(host="127.0.0.1", port=9464).tick()
    assert tried == [9464, 9465, 9466]


def test_a_port_for_root_alone_says_what_to_do():
    error = PermissionError(errno.EACCES, "Permission denied")
    assert module.explained(error, "127.0.0.1", 80)[1] == "set port to one above 1023"


def test_the_training_starts_at_once_with_a_silent_resolver(tmp_path):
    """The resolver never answers. The script ends before it could have answered."""
    run_script(
        """
        import json, socket, threading
        import telemetry
        from telemetry.util.threads import named

        real, asked_on, silent = socket.getaddrinfo, [], threading.Event()

        def getaddrinfo(host, port, *args, flags=0, **kwargs):
            if not flags & socket.AI_NUMERICHOST:
                asked_on.append(named(threading.get_ident()))
                silent.wait(300)
            return real(host, port, *args, flags=flags, **kwargs)

        socket.getaddrinfo = getaddrinfo
        agent = telemetry.start("run", host="node.example", port=9464, interval_seconds=0.1, log_interval_seconds=0.1)
        ticks = agent._node.board.path
        while not any(ticks.glob("rank-0.*")):
            pass
        for _ in telemetry.watch(range(100)):
            pass
        while agent.accounting.stats.steps < 99:
            pass
        with open("results.json", "w") as file:
            json.dump([asked_on, agent.metrics_url], file)
        telemetry.stop()
        """,
        tmp_path,
        env=environment(),
    )
    assert results(tmp_path) == [["telemetry-resolver"], None]
    assert events(tmp_path / "run", "run_end")[0]["steps_total"] == 100


def test_a_bad_host_is_one_line_in_the_log(tmp_path):
    done = run_script(
        """
        import telemetry
        agent = telemetry.start("run", host="192.0.2.1", port=9464, interval_seconds=0.1, log_interval_seconds=0.1)
        while agent.errors.counts.get("endpoint", 0) < 1 or agent._node._pause < 4:
            agent._thread.join(0.01)
        telemetry.stop()
        """,
        tmp_path,
    )
    (line,) = [line for line in events(tmp_path / "run", "error") if line["source"] == "endpoint"]
    assert "192.0.2.1 cannot be listened on" in line["message"]
    assert "set host to" in line["message"]
    assert "no metrics endpoint (192.0.2.1 cannot be listened on (Cannot assign requested address))" in done.stderr


def test_a_host_that_is_only_looked_up_is_scraped_by_that_name(tmp_path):
    run_script(
        """
        import json, socket, urllib.request
        import telemetry
        real = socket.getaddrinfo
        def getaddrinfo(host, port, *args, **kwargs):
            return real("127.0.0.1" if host == "node.example" else host, port, *args, **kwargs)
        socket.getaddrinfo = getaddrinfo
        agent = telemetry.start("run", host="node.example", port=0, start_line=False)
        while agent.metrics_url is None:
            agent._thread.join(0.01)
        page = urllib.request.urlopen(agent.metrics_url).read().decode()
        with open("results.json", "w") as file:
            json.dump([agent.metrics_url, page], file)
        telemetry.stop()
        """,
        tmp_path,
    )
    url, page = results(tmp_path)
    assert url.startswith("http://node.example:")
    assert value(page, "training_run_ended") == 0


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
        ("n1.dc.example:9464", True),
        ("n1.dc2.example", True),
        ("n1.cluster.local", True),
        ("metrics.example:80", True),
        ("localhost", True),
        ("10.9.8.7", True),
        ("[fe80::1%eth0]:9464", True),
        ("n1.evil.com", False),
        ("n1.comment", False),
        ("n1.dc.example.evil.com", False),
        ("evil.alias", False),
        ("n2.dc.example", False),
        ("localhost.cluster.local", False),
        ("[n1]", False),
        ("n1:port", False),
        ("", False),
        (".", False),
    ],
)
def test_names_of_a_node_are_exact(header, known, etc):
    assert HostNames(["metrics.example", "n1"], etc).knows(header) is known
