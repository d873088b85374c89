"""A forked child is inert, whatever our threads were at when it was forked; and it holds nothing of its parent's."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from faults.processes import (
    Child,
    environment,
    events,
    fetch,
    free_port,
    log_lines,
    results,
    run_script,
    samples,
    value,
    wait_for,
    write,
)

# What a child can say of itself: our threads, the sockets and files of ours that it holds, and what hooks would do.
LOOK = '''
import json, os, sys, threading


def fds():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass
    return found


def listening():
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            inodes |= {line.split()[9] for line in list(file)[1:] if line.split()[3] == "0A"}
    return [where for where in fds().values() if where.startswith("socket:[") and where[8:-1] in inodes]


def look():
    api = sys.modules.get("telemetry.api")
    agent = api and api._agent
    return {
        "pid": os.getpid(),
        "threads": [thread.name for thread in threading.enumerate() if "telemetry" in thread.name],
        "listening": listening(),
        # But for a folder that the agent was reading just when it was forked: nobody can close that for it.
        "ours": [w for w in fds().values() if ("torch-telemetry" in w or w.endswith(".jsonl")) and not os.path.isdir(w)],
        "running": bool(agent and agent.running),
        "inactive": type(api.start("never")).__name__ if api else None,
        "finders": [type(finder).__module__ for finder in sys.meta_path if "telemetry" in type(finder).__module__],
    }


def in_child(body, seconds=60):
    """Fork; what body() returns in the child, or what went wrong there."""
    import select, signal, traceback
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = body()
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], seconds)
    if not ready:
        os.kill(pid, signal.SIGABRT)
        os.waitpid(pid, 0)
        return {"error": "the child hangs"}
    with os.fdopen(read, "rb") as file:
        answer = json.loads(file.read())
    os.waitpid(pid, 0)
    return answer
'''

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
    """A child forked while every lock of ours is held by other threads."""
    folder = tmp_path_factory.mktemp("held")
    write(folder, "look.py", LOOK)
    write(folder, "locks.py", LOCKS)
    done = run_script(
        """
        import json, os, socket, sys, threading, time, urllib.request
        import telemetry, telemetry.api
        from look import in_child, look
        from locks import Held, locks_below

        def batches():
            yield from range(5)

        agent = telemetry.start("run", run="r", interval_seconds=0.1, log_interval_seconds=0.1)
        watched = telemetry.watch(list(range(5)))
        list(watched)
        client = socket.create_connection(("127.0.0.1", agent._node.port))  # one connection is open, and not answered
        while not agent._node.endpoint._server._open:
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
            found["own_threads"] = [t.name for t in threading.enumerate() if t.name == "telemetry-agent"]
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

        locks = locks_below(agent, telemetry.api._starting)
        assert telemetry.api._starting in locks
        assert agent._wake._cond._lock in locks
        assert agent._node.endpoint._server._guard in locks
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
    """Another thread starts the agent; the fork comes while it has attached, or listens, but has not returned."""
    write(tmp_path, "look.py", LOOK)
    done = run_script(
        f"""
        import json, sys, threading, telemetry, telemetry.agent
        from look import in_child, look

        reached, go_on = threading.Event(), threading.Event()
        def stop_here(*_, **__):
            reached.set()
            assert go_on.wait(60)

        if {moment!r} == "log":
            from telemetry.publish.jsonl import LogFile
            write = LogFile.write
            LogFile.write = lambda self, line: stop_here() or write(self, line)
        else:
            start = threading.Thread.start
            def patched(thread):
                if thread.name == {{"endpoint": "telemetry-endpoint", "thread": "telemetry-agent"}}[{moment!r}]:
                    stop_here()
                start(thread)
            threading.Thread.start = patched

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


def test_a_child_that_exits_in_the_ordinary_way_ends_nothing_of_its_parent(tmp_path):
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


# -- the real DataLoader -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loader_run(tmp_path_factory):
    """Workers under each start method; ``telemetry.start()`` stands unguarded at the top of the script."""
    folder = tmp_path_factory.mktemp("loader")
    write(folder, "look.py", LOOK)
    done = run_script(
        """
        import json, os, sys
        import torch
        import telemetry
        from look import in_child, look

        agent = telemetry.start("run", run="r", interval_seconds=0.1, log_interval_seconds=0.2)

        class Looking(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return json.dumps(look())

        def trained(batches):
            parameter = torch.nn.Parameter(torch.ones(1))
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            for _ in batches:
                parameter.grad = torch.ones(1)
                optimizer.step()

        if __name__ == "__main__":
            assert agent.running
            found = {}
            for method in ("fork", "spawn", "forkserver"):
                loader = torch.utils.data.DataLoader(
                    Looking(), batch_size=None, num_workers=1, multiprocessing_context=method
                )
                found[method] = [json.loads(batch) for batch in loader]

            def child():
                loader = torch.utils.data.DataLoader(list(range(6)), batch_size=2)
                head = agent.tracker.ring.head
                trained(loader)
                torch.save({}, os.devnull)
                written = agent.tracker.ring.head - head
                telemetry.start("child", run="c", interval_seconds=0.1)
                trained(loader)
                telemetry.stop()
                return {"written": written}

            found["child"] = in_child(child)
            telemetry.stop()
            found["pid"] = os.getpid()
            with open("results.json", "w") as file:
                json.dump(found, file)
        """,
        folder,
        env=environment(TELEMETRY_START_LINE="off"),
    )
    return folder, done, results(folder)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_has_nothing_of_ours(method, loader_run):
    _, _, found = loader_run
    assert len(found[method]) == 4
    for worker in found[method]:
        assert worker["pid"] != found["pid"]
        assert (worker["threads"], worker["running"], worker["finders"]) == ([], False, [])
        assert (worker["listening"], worker["ours"]) == ([], [])
        assert worker["inactive"] == "InactiveAgent", "start() in a worker does nothing"


def test_an_unguarded_start_logs_for_the_training_process_alone(loader_run):
    folder, done, found = loader_run
    assert (done.stdout, done.stderr) == ("", "")
    assert {line["pid"] for line in log_lines(folder / "run")} == {found["pid"]}
    assert not (folder / "never").exists()
    assert [line["steps_total"] for line in events(folder / "run", "run_end")] == [12]


def test_hooks_pass_through_in_a_forked_child_until_it_starts_its_own(loader_run):
    folder, _, found = loader_run
    assert found["child"] == {"written": 0}
    (end,) = events(folder / "child", "run_end")
    assert end["steps_total"] == 3
    assert end["pid"] != found["pid"]


def test_a_killed_rank_s_port_is_free_while_its_workers_live_on(tmp_path):
    """The successor serves at the same port, which a worker's copy of the listening socket would hold."""
    serving = """
        import os, sys, telemetry
        agent = telemetry.start("run", run="r", start_line=False, interval_seconds=0.1)
        print(agent.metrics_url, flush=True)
        if "train" in sys.argv:
            import torch
            class Blocking(torch.utils.data.Dataset):
                def __len__(self):
                    return 2
                def __getitem__(self, index):
                    os.write(pipe, b"%d" % os.getpid())
                    os.read(never, 1)  # for ever: the worker does not see its parent die
            read, pipe = os.pipe()
            never, _ = os.pipe()
            loader = iter(torch.utils.data.DataLoader(Blocking(), batch_size=None, num_workers=1,
                                                      multiprocessing_context="fork"))
            print(os.read(read, 16).decode(), flush=True)
        sys.stdin.readline()
        """
    script = write(tmp_path, "script.py", serving)
    port = str(free_port())
    ranks = [environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", TELEMETRY_PORT=port) for rank in (0, 1)]
    with Child(script, "train", cwd=tmp_path, env=ranks[0]) as first:
        url = first.line()
        worker = int(first.line())
        with Child(script, cwd=tmp_path, env=ranks[1]) as second:
            assert second.line() == url, "one endpoint for both"
            wait_for(lambda: len(samples(fetch(url))["training_steps_total"]) == 2, "both ranks")

            os.kill(first.pid, signal.SIGKILL)
            assert first.wait() == -signal.SIGKILL

            def taken_over():
                try:
                    page = fetch(url)
                except OSError:
                    return False
                return {labels["rank"] for labels, _ in samples(page)["training_steps_total"]} == {"1"}

            wait_for(taken_over, "the other rank serves at the same port", seconds=20)
            os.kill(worker, 0)  # it has lived through all of that

            os.kill(second.pid, signal.SIGKILL)
            second.wait()
            assert url == f"http://127.0.0.1:{port}/metrics"
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind(("127.0.0.1", int(port)))
                free.listen()
            os.kill(worker, 0)
