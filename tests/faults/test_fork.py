"""The agent is inactive in a forked child, whatever its threads did during the fork. The child keeps none of its files."""

from __future__ import annotations

import pytest

from faults.processes import (
    environment,
    events,
    log_lines,
    results,
    run_script,
    value,
    write,
)
from tests.faults.fork_scripts import LOOK

LOCKS = '''
import _thread, gc, threading, types

_KINDS = (_thread.LockType, _thread.RLock)
_AROUND = (types.ModuleType, type, types.BuiltinFunctionType, types.FrameType, types.CodeType)


def locks_below(*roots):
    """Every lock that can be reached from our objects, without going into modules, classes or globals."""
    seen, found, waiting = set(), [], list(roots)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, _AROUND):
            continue
        seen.add(id(thing))
        if isinstance(thing, _KINDS):
            found.append(thing)
        elif isinstance(thing, types.FunctionType):
            waiting += [cell.cell_contents for cell in thing.__closure__ or ()]
        else:
            waiting += gc.get_referents(thing)
    return found


class Held:
    """All of them held by another thread. One that is held already (a thread of ours waits on it) is as good."""

    def __init__(self, locks):
        self.locks, self.ready, self.release = locks, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hold, daemon=True)

    def hold(self):
        mine = [lock for lock in self.locks if lock.acquire(timeout=0.2)]
        self.ready.set()
        self.release.wait()
        for lock in mine:
            lock.release()

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(60)
        return self

    def __exit__(self, *_):
        self.release.set()
        self.thread.join()
'''


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A child is forked while other threads hold every lock of the agent."""
    folder = tmp_path_factory.mktemp("held")
    write(folder, "look.py", LOOK)
    write(folder, "locks.py", LOCKS)
    done = run_script(
        """
        import json, os, socket, sys, threading, time, urllib.request
        import telemetry, telemetry.api
        from telemetry.util import threads as own_threads
        from look import in_child, look
        from locks import Held, locks_below

        def batches():
            yield from range(5)

        agent = telemetry.start("run", run="r", interval_seconds=0.1, log_interval_seconds=0.1)
        watched = telemetry.watch(list(range(5)))
        list(watched)
        client = socket.create_connection(("127.0.0.1", agent._node.port))  # one connection is open, and not answered
        while not agent._node.endpoint._connections:
            threading.Event().wait(0.01)
        before = agent.tracker.ring.head

        def child():
            found = look_before_start()
            head = agent.tracker.ring.head
            assert list(watched) == [0, 1, 2, 3, 4]
            with telemetry.step(), telemetry.phase("evaluation"):
                pass
            telemetry.stop()
            found["written"] = agent.tracker.ring.head - head
            found["connection"] = client_fd_is_dup()
            mine = telemetry.start("run", run="r", interval_seconds=0.1)
            found["started"] = mine.running and mine is not agent
            found["own_threads"] = [name for name in own_threads.running() if name == "telemetry-agent"]
            assert list(telemetry.watch([1, 2, 3])) == [1, 2, 3]
            found["url"] = mine.metrics_url
            telemetry.stop()
            return found

        def look_before_start():
            import look as module
            api = telemetry.api
            start, api.start = api.start, lambda *_: None
            try:
                return module.look()
            finally:
                api.start = start

        def client_fd_is_dup():
            # The server's end of the open connection must be closed here: else a client would wait for us.
            mine = client.getsockname()[1]
            with open("/proc/net/tcp") as file:
                rows = [line.split() for line in list(file)[1:]]
            inodes = {row[9] for row in rows if int(row[2].split(":")[1], 16) == mine}
            import look as module
            return [where for where in module.fds().values() if where.startswith("socket:[") and where[8:-1] in inodes]

        locks = locks_below(agent, telemetry.api._starting, own_threads._guard)
        assert telemetry.api._starting in locks
        assert agent._between_ticks._wake._gate in locks
        with Held(locks):
            answer = in_child(child)
        answer["locks"] = len(locks)
        answer["parent_url"] = agent.metrics_url
        answer["parent_pid"] = os.getpid()
        answer["parent_written"] = agent.tracker.ring.head - before
        client.close()
        deadline = time.monotonic() + 60
        answer["page"] = ""
        while 'training_steps_total{rank="0",run="r"} 5.0' not in answer["page"] and time.monotonic() < deadline:
            with urllib.request.urlopen(agent.metrics_url) as page:
                answer["page"] = page.read().decode()
        telemetry.stop()
        with open("results.json", "w") as file:
            json.dump(answer, file)
        """,
        folder,
        env=environment(TELEMETRY_START_LINE="off"),
    )
    return folder, done, results(folder)


def test_a_child_forked_under_every_lock_of_ours_is_inert(held):
    _, done, child = held
    assert "error" not in child, child["error"]
    assert child["locks"] >= 6
    assert (child["threads"], child["running"], child["finders"]) == ([], False, [])
    assert (child["listening"], child["ours"], child["connection"]) == ([], [], [])
    assert child["written"] == 0
    assert (done.stdout, done.stderr) == ("", "")


def test_such_a_child_can_start_an_agent_of_its_own(held):
    folder, _, child = held
    assert child["started"] is True
    assert child["own_threads"] == ["telemetry-agent"]
    assert child["url"] == child["parent_url"], "the parent serves both"
    lines = [line for line in log_lines(folder / "run") if line["pid"] == child["pid"]]
    assert [line["event"] for line in lines if line["event"].startswith("run_")] == ["run_start", "run_end"]
    assert lines[-1]["steps_total"] == 3


def test_the_parent_goes_on_after_such_a_fork(held):
    folder, _, child = held
    assert child["parent_written"] == 0
    assert value(child["page"], "training_steps_total", run="r", rank="0") == 5
    assert {line["pid"] for line in events(folder / "run", "run_end")} == {child["pid"], child["parent_pid"]}


@pytest.mark.parametrize("moment", ["log", "endpoint", "thread"])
def test_a_child_forked_in_the_middle_of_the_start_is_inert_too(moment, tmp_path):
    """Another thread starts the agent. The fork happens after it has attached, or listens, but before it returns."""
    write(tmp_path, "look.py", LOOK)
    done = run_script(
        f"""
        import json, sys, threading, telemetry, telemetry.agent.agent
        from telemetry.util import threads as own_threads
        from look import in_child, look

        reached, go_on = threading.Event(), threading.Event()
        def stop_here(*_, **__):
            reached.set()
            assert go_on.wait(60)

        if {moment!r} == "log":
            from telemetry.agent.log import LogFile
            write = LogFile.write
            LogFile.write = lambda self, line: stop_here() or write(self, line)
        else:
            start = own_threads.start_new_thread
            def patched(main, arguments):
                if main.__self__.name == {{"endpoint": "telemetry-endpoint", "thread": "telemetry-agent"}}[{moment!r}]:
                    stop_here()
                return start(main, arguments)
            own_threads.start_new_thread = patched

        other = threading.Thread(target=telemetry.start, args=("run",))
        other.start()
        assert reached.wait(60)

        def child():
            go_on.set()
            found = look_quietly()
            found["started"] = telemetry.start("child", port=0).running
            telemetry.stop()
            return found

        def look_quietly():
            start, telemetry.api.start = telemetry.api.start, lambda *_: None
            try:
                return look()
            finally:
                telemetry.api.start = start

        answer = in_child(child)
        go_on.set()
        other.join()
        answer["parent"] = telemetry.start().running
        with open("results.json", "w") as file:
            json.dump(answer, file)
        """,
        tmp_path,
        env=environment(TELEMETRY_START_LINE="off"),
    )
    child = results(tmp_path)
    assert "error" not in child, child["error"]
    assert (child["threads"], child["running"], child["finders"], child["listening"]) == ([], False, [], [])
    assert child["started"] is True
    assert child["parent"] is True
    assert done.stderr == ""
    assert len({line["pid"] for line in log_lines(tmp_path / "run")}) == 1
    assert len({line["pid"] for line in log_lines(tmp_path / "child")}) == 1


def test_a_child_that_exits_normally_ends_nothing_of_its_parent(tmp_path):
    done = run_script(
        """
        import os, sys, telemetry, urllib.request
        agent = telemetry.start("run", start_line=False)
        pid = os.fork()
        if pid == 0:
            sys.exit(9)  # atexit is run, in the child too
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert urllib.request.urlopen(agent.metrics_url).status == 200
        """,
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert len(events(tmp_path / "run", "run_start")) == 1
    assert len(events(tmp_path / "run", "run_end")) == 1
