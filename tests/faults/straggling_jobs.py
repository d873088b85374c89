"""Jobs of four ranks on two emulated nodes, of which some are made slow while they train, and what is written of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.faults.processes import environment, events, wait_for, write
from tests.free_ports import free_ports

NODES = ("n1", "n1", "n2", "n2")
"""The node of each rank."""

PACE_SECONDS = 0.05
"""Time of a step on each rank without the others."""

JOB = """
    import json, os, sys, time
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    rank, pace, every = int(os.environ["RANK"]), float(sys.argv[1]), 8
    torch.set_num_threads(1)


    class Order:
        what, seconds, over, seen = "", 0.0, False, 0

        def look(self):
            stamp = os.stat("order.json").st_mtime_ns
            if stamp != self.seen:
                with open("order.json") as file:
                    order = json.load(file)
                self.what = order["what"] if rank in order["ranks"] else ""
                self.seconds, self.over, self.seen = order["seconds"], order["what"] == "end", stamp


    class Samples(Dataset):
        def __len__(self):
            return 1 << 20

        def __getitem__(self, index):
            if order.what == "loader":
                time.sleep(order.seconds)
            return torch.full((64,), index % 7 / 7)


    class SlowStorage:
        def __init__(self, seconds):
            self.seconds = seconds

        def write(self, data):
            time.sleep(self.seconds)
            self.seconds = 0.0
            return len(data)

        def flush(self):
            pass


    def think(seconds):
        time.sleep(seconds)  # the compute


    def evaluate(seconds):
        with torch.no_grad():
            for _ in DataLoader(range(8), batch_size=1):
                time.sleep(seconds / 8)


    def save(seconds):
        torch.save({}, SlowStorage(seconds), _use_new_zipfile_serialization=False)


    order = Order()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(DataLoader(Samples(), batch_size=1)):
        order.look()
        time.sleep(pace)
        if order.what in {"compute", "node", "percent"}:
            think(order.seconds)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0 and order.what == "evaluation":
            evaluate(every * order.seconds)
        if step % every == 0 and order.what == "checkpoint":
            save(every * order.seconds)
        over = torch.tensor(float(order.over))
        dist.all_reduce(over)
        if over > 0:
            break
    dist.destroy_process_group()
"""


def line_of(comment: str) -> int:
    """The line of the script that has this comment."""
    (number,) = [n for n, text in enumerate(JOB.lstrip("\n").splitlines(), 1) if text.endswith(f"# {comment}")]
    return number


class StragglingJob:
    """Two torchrun agents, each with a node's name and two ranks, and one run folder.

    Args:
        folder: of the job. The run folder is in it.
        window: ``stall_window_seconds``.
    """

    def __init__(self, folder: Path, *, window: float) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        script = write(folder, "train.py", JOB)
        self.order("")
        port = str(free_ports())
        self.agents = []
        for number, node in enumerate(dict.fromkeys(NODES)):
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)),
                *("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port),
                *("-m", "telemetry", "run", "--run-dir", "run", "--stall-window-seconds", f"{window:g}"),
                *(str(script), str(PACE_SECONDS)),
            ]
            env = environment(TELEMETRY_NODE=node, OMP_NUM_THREADS="1")
            with (folder / f"{node}.txt").open("wb") as output:
                self.agents.append(
                    subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True)
                )

    def __enter__(self) -> StragglingJob:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)  # it ends its ranks, which are in sessions of their own
        for agent in self.agents:
            agent.wait(60)

    @property
    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("n?.txt")))

    def order(self, what: str, ranks: tuple[int, ...] = (), seconds: float = 0.0) -> None:
        """From now on these ranks are slow in this way: by so many seconds a step, on average."""
        path = self.folder / "order.json"
        path.with_suffix(".new").write_text(json.dumps({"what": what, "ranks": ranks, "seconds": seconds}))
        os.replace(path.with_suffix(".new"), path)

    def trains(self) -> None:
        """Wait until all ranks have trained for a while."""

        def all_train() -> bool:
            assert all(agent.poll() is None for agent in self.agents), self.output
            return {line["rank"] for line in self.logged("window") if line["steps"]} == set(range(len(NODES)))

        wait_for(all_train, "all ranks train")

    def logged(self, event: str) -> list[dict]:
        return events(self.run_dir, event, running=True) if (self.run_dir / "logs").exists() else []

    def open_stalls(self) -> list[dict]:
        """The stalls that are open now, the newest of each rank."""
        newest: dict[int, dict] = {}
        for line in sorted([*self.logged("stall_open"), *self.logged("stall_close")], key=lambda line: line["time"]):
            newest[line["rank"]] = line
        return [line for line in newest.values() if line["event"] == "stall_open"]
