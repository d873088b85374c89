"""The agent is inactive in a forked child and in a worker, whatever its threads did meanwhile. They keep none of its files."""

from __future__ import annotations

import pytest

from tests.faults.forked import NOTHING
from tests.faults.processes import (
    end_of,
    events,
    log_lines,
    run,
    write,
)

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
    write(folder, "locks.py", LOCKS)
    source = """
        import os, socket
        import telemetry, telemetry.api
        from locks import Held, locks_below
        from tests.faults.forked import in_child, look, sockets
        from tests.faults.inside import own_threads, page, tell, until

        agent = telemetry.start("run", run="r")
        watched = telemetry.watch(list(range(5)))
        list(watched)
        client = socket.create_connection(("127.0.0.1", agent._node.port))  # one connection is open, and not answered
        until(lambda: agent._node.endpoint.open)
        before = agent.tracker.ring.head

        def child():
            found, head = look(), agent.tracker.ring.head
            assert list(watched) == [0, 1, 2, 3, 4]
            with telemetry.step(), telemetry.phase("evaluation"):
                pass
            telemetry.stop()
            found["written"] = agent.tracker.ring.head - head
            # The server's end of the open connection must be closed here: else a client would wait for us.
            found["connection"] = sockets(2, f":{client.getsockname()[1]:04X}")
            mine = telemetry.start("run", run="r")
            found["started"] = mine.running and mine is not agent
            found["own threads"] = own_threads()
            assert list(telemetry.watch([1, 2, 3])) == [1, 2, 3]
            found["url"] = mine.metrics_url
            telemetry.stop()
            return found

        locks = locks_below(agent, telemetry.api._starting)
        assert telemetry.api._starting in locks
        assert agent._wake._gate in locks
        with Held(locks):
            answer = in_child(child)
        answer |= {"locks": len(locks), "parent url": agent.metrics_url, "parent": os.getpid()}
        answer["parent written"] = agent.tracker.ring.head - before
        client.close()
        until(lambda: 'training_steps_total{rank="0",run="r"} 5.0' in page())
        telemetry.stop()
        tell(answer)
        """
    return folder, run(folder, source)


def test_a_child_forked_under_every_lock_of_ours_is_inert(held):
    _, child = held
    assert "error" not in child, child["error"]
    assert child["locks"] >= 6
    assert child | NOTHING == child
    assert (child["connection"], child["written"]) == ([], 0)


def test_such_a_child_can_start_an_agent_of_its_own_and_the_parent_goes_on(held):
    folder, child = held
    assert child["started"] is True
    assert child["own threads"] == ["telemetry-agent"]
    assert child["url"] == child["parent url"], "the parent serves both"
    lines = [line for line in log_lines(folder / "run") if line["pid"] == child["pid"]]
    assert [line["event"] for line in lines if line["event"].startswith("run_")] == ["run_start", "run_end"]
    assert lines[-1]["steps_total"] == 3
    assert child["parent written"] == 0
    assert {line["pid"] for line in events(folder / "run", "run_end")} == {child["pid"], child["parent"]}


def test_a_child_that_exits_normally_ends_nothing_of_its_parent(tmp_path):
    source = """
        import os, sys, telemetry
        from tests.faults.inside import page
        telemetry.start("run")
        pid = os.fork()
        if pid == 0:
            sys.exit(9)  # atexit is run, in the child too
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert page()
        """
    run(tmp_path, source)
    assert len(events(tmp_path / "run", "run_start")) == len(events(tmp_path / "run", "run_end")) == 1


# -- the real DataLoader -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loader_run(tmp_path_factory):
    """Workers under each start method. ``telemetry.start()`` is unguarded at the top of the script."""
    source = """
        import os
        import torch
        import telemetry
        from tests.faults.forked import in_child, look
        from tests.faults.inside import tell
        from tests.quick_optimizers import QuickSGD

        agent = telemetry.start("run", run="r")

        class Looking(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return look() | {"started": type(telemetry.start("never")).__name__}

        def trained(batches):
            parameter = torch.nn.Parameter(torch.ones(1))
            optimizer = QuickSGD([parameter], lr=0.1)
            for _ in batches:
                parameter.grad = torch.ones(1)
                optimizer.step()

        if __name__ == "__main__":
            assert agent.running
            found = {"pid": os.getpid()}
            for method in ("fork", "spawn", "forkserver"):
                loader = torch.utils.data.DataLoader(
                    Looking(), batch_size=None, num_workers=1, multiprocessing_context=method
                )
                found[method] = list(loader)

            def child():
                loader = torch.utils.data.DataLoader(list(range(6)), batch_size=2)
                head = agent.tracker.ring.head
                trained(loader)
                torch.save({}, os.devnull)
                written = agent.tracker.ring.head - head
                telemetry.start("child", run="c")
                trained(loader)
                telemetry.stop()
                return {"written": written}

            found["child"] = in_child(child)
            telemetry.stop()
            tell(found)
        """
    folder = tmp_path_factory.mktemp("loader")
    return folder, run(folder, source)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_has_nothing_of_ours(method, loader_run):
    _, found = loader_run
    threads = ["telemetry-stacks", "telemetry-stack"]  # our name, and the kernel's
    assert len(found[method]) == 4
    for worker in found[method]:
        assert worker["pid"] != found["pid"]
        assert worker | NOTHING | {"threads": threads, "started": "InactiveAgent"} == worker


def test_an_unguarded_start_logs_for_the_training_process_alone(loader_run):
    folder, found = loader_run
    assert {line["pid"] for line in log_lines(folder / "run")} == {found["pid"]}
    assert not (folder / "never").exists()
    assert end_of(folder / "run")["steps_total"] == 12


def test_hooks_pass_through_in_a_forked_child_until_it_starts_its_own(loader_run):
    folder, found = loader_run
    assert found["child"] == {"written": 0}
    end = end_of(folder / "child")
    assert end["steps_total"] == 3
    assert end["pid"] != found["pid"]
