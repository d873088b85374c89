"""Other code closes descriptors or uses all of them: the training's files are not touched, and the agent goes on."""

from __future__ import annotations

import errno
import os
import socket
import socketserver
import threading
import time

from faults.processes import HANG, events, fetch, run_script, wait_for
from telemetry.publish.board import RankState
from telemetry.publish.endpoint import Endpoint
from telemetry.publish.exposition import CONTENT_TYPE
from telemetry.publish.http_server import CONNECTION_SECONDS
from telemetry.util import threads


def test_a_reused_descriptor_number_belongs_to_its_new_owner(tmp_path):
    """As a daemon does: all descriptors are closed, and the next files get the numbers of the agent's."""
    done = run_script(
        """
        import os, sys, time, urllib.request
        import telemetry
        from telemetry.util.threads import Wake

        agent = telemetry.start("run", start_line=False, port=0, interval_seconds=0.5, log_interval_seconds=0.5)
        logs = os.listdir("run/logs")

        def waits():
            return sys._current_frames()[agent._thread.ident].f_code is Wake.wait.__code__

        while waits():
            pass
        while not waits():
            pass  # what a tick has open while it reads it has a number too, which no thread can close safely then
        os.closerange(3, 64)
        theirs = [os.open(f"theirs-{number}", os.O_CREAT | os.O_RDWR) for number in range(60)]
        before = os.path.getsize(f"run/logs/{logs[0]}")

        def goes_on():
            try:
                status = urllib.request.urlopen(agent.metrics_url).status
            except OSError:
                return False
            return status == 200 and os.path.getsize(f"run/logs/{logs[0]}") > before

        while not goes_on():
            time.sleep(0.02)
        pid = os.fork()
        if pid == 0:
            raise SystemExit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
        telemetry.stop()
        for number, file in enumerate(theirs):
            assert os.readlink(f"/proc/self/fd/{file}") == os.path.abspath(f"theirs-{number}")
            assert os.fstat(file).st_size == 0
        """,
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert len(events(tmp_path / "run", "run_start")) == 1
    assert len(events(tmp_path / "run", "run_end")) == 1


def test_a_connection_that_others_close_ends_in_silence(capfd):
    asked, release = threading.Event(), threading.Event()

    def states():
        asked.set()
        release.wait(HANG)
        return []

    endpoint = Endpoint("127.0.0.1", [0], states, "the-node", CONTENT_TYPE)
    try:
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=HANG) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n")
            wait_for(lambda: endpoint._server._open, "it is accepted")
            (served,) = endpoint._server._open
            wait_for(lambda: served.gettimeout() == CONNECTION_SECONDS, "it has its thread")
            client.sendall(b"\r\n")
            assert asked.wait(HANG)
            os.close(served.fileno())
            release.set()
            wait_for(lambda: not endpoint._server._open, "it is given up")
    finally:
        endpoint.close()
    wait_for(lambda: "telemetry-request" not in threads.running(), "its thread is gone")
    assert capfd.readouterr() == ("", "")


def test_a_connection_that_cannot_be_accepted_is_retried_with_a_pause(monkeypatch):
    """For example, no descriptor is left: then poll reports the connection as ready again and again."""
    tried = []
    enough = threading.Event()
    accept = socketserver.TCPServer.get_request

    def failing(server):
        tried.append(time.monotonic())
        if len(tried) > 3:
            enough.set()
            return accept(server)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socketserver.TCPServer, "get_request", failing)
    state = RankState(0, 1, ((b"# HELP x X.\n# TYPE x gauge\n", b"x 1.0\n"),))
    endpoint = Endpoint("127.0.0.1", [0], lambda: [state], "the-node", CONTENT_TYPE)
    try:
        assert fetch(f"http://127.0.0.1:{endpoint.port}/metrics").endswith("x 1.0\n")
    finally:
        endpoint.close()
    assert enough.is_set()
    assert all(later - earlier > 0.05 for earlier, later in zip(tried[:3], tried[1:4], strict=True))
