"""Workers that a real DataLoader forks have nothing of the agent."""

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
    log_lines,
    results,
    run_script,
    samples,
    wait_for,
    write,
)
from tests.faults.fork_scripts import LOOK
from tests.free_ports import free_ports

# -- the real DataLoader -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loader_run(tmp_path_factory):
    """Workers under each start method. ``telemetry.start()`` is unguarded at the top of the script."""
    folder = tmp_path_factory.mktemp("loader")
    write(folder, "look.py", LOOK)
    done = run_script(
        """
        import json, os, sys
        import torch
        import telemetry
        from quick_optimizers import QuickSGD
        from look import in_child, look

        agent = telemetry.start("run", run="r", interval_seconds=0.1, log_interval_seconds=0.2)

        class Looking(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return json.dumps(look())

        def trained(batches):
            parameter = torch.nn.Parameter(torch.ones(1))
            optimizer = QuickSGD([parameter], lr=0.1)
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
        assert (worker["running"], worker["finders"]) == (False, [])
        assert worker["threads"] == ["telemetry-stacks", "telemetry-stack"], "our name, and the kernel's"
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
    """The successor serves at the same port. A worker's copy of the listening socket would block the port."""
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
    port = str(free_ports())
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
            os.kill(worker, 0)  # the worker is still alive

            os.kill(second.pid, signal.SIGKILL)
            second.wait()
            assert url == f"http://127.0.0.1:{port}/metrics"
            with socket.socket() as free:
                free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                free.bind(("127.0.0.1", int(port)))
                free.listen()
            os.kill(worker, 0)
