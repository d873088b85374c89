"""CPU time of the threads that an agent adds to a loop with DataLoader workers, in its first minute and later.

The same loop runs with telemetry and, in its own environment, with TraceML. It trains a tiny model, so that an
optimizer steps as in any training. All Python threads of the training process count, except the training thread and
those of its DataLoader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks import child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SLICE_SECONDS: Final = 5.0
"""Length of one reading. It is long enough that the log's window, written every ten seconds, evens out over a few."""

_SETTLE_SECONDS: Final = 25.0
"""After this, nothing is imported any more, and telemetry skips most ticks."""

_STEP_SECONDS: Final = 0.01
_LOADER_THREADS: Final = ("QueueFeederThread", "Thread-")
BESIDE: Final = "its other processes"

_SCRAPER: Final = """
import sys, time, urllib.request
while True:
    began = time.monotonic()
    urllib.request.urlopen(sys.argv[1], timeout=5).read()
    time.sleep(max(0.0, float(sys.argv[2]) - (time.monotonic() - began)))
"""


class Samples(Dataset[Any]):  # type: ignore[misc]
    """Small samples that take a little time. The data set is longer than any benchmark."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return torch.full((3, 8, 8), float(index))


Step = AbstractContextManager[Any]


def measure(*, slices: int, workers: int, slice_seconds: float = SLICE_SECONDS, sinks: str = "") -> dict[str, Any]:
    """Shares of a core, by thread, in each slice of a loop with workers, with one scrape a second.

    Under ``training_us`` it has what the agent adds to a step on the training thread, as it measures itself.
    """
    import telemetry

    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as run_dir:
        agent: Any = telemetry.start(run_dir, port=0, start_line=False, sinks=sinks)
        with scraping(agent.metrics_url, 1.0):
            training = Training(workers)
            training.settle(slice_seconds)
            found = {"slices": training.readings(slices, slice_seconds), "steps": training.steps}
        figures = telemetry.metrics()
        telemetry.stop()
    step_us = 1e6 * figures["overhead_training_seconds_total"] / max(1.0, figures["steps_total"])
    return found | {"training_us": step_us, "errors": agent.errors.counts.get("sinks", 0)}


def measure_life(*, slices: int, workers: int, first: float, settle: float, scrape_seconds: float) -> dict[str, Any]:
    """Shares of a core in the first minute, and when the run is calm.

    Args:
        slices: number of readings when it is calm. Each is as long as the time between two scrapes.
        workers: of the loader.
        first: how long the first reading takes, s.
        settle: how long the run is then let alone, s.
        scrape_seconds: time between two scrapes.

    Returns:
        ``first``, the reading of the first minute; ``slices``, those when it is calm; ``often``, those after them, with
        one scrape a second.
    """
    import telemetry

    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as run_dir:
        agent: Any = telemetry.start(run_dir, port=0, start_line=False)
        with scraping(agent.metrics_url, scrape_seconds):
            training = Training(workers)
            young = training.readings(1, first)
            training.run(settle)
            calm = training.readings(slices, scrape_seconds)
        with scraping(agent.metrics_url, 1.0):
            often = training.readings(slices, min(SLICE_SECONDS, scrape_seconds))
        telemetry.stop()
    return {"first": young[0], "slices": calm, "often": often}


def measure_traceml(*, slices: int, workers: int, first: float, scrape_seconds: float) -> dict[str, Any]:
    """The first two readings with TraceML. It has no metrics to scrape, and does not grow calm.

    Its launcher and its collector process count separately. Runs in its environment.
    """
    import traceml_ai  # type: ignore[import-not-found,unused-ignore]

    config = traceml_ai.init(mode="auto")
    training = Training(workers, traceml_ai.trace_step, _launched_beside())
    young = training.readings(1, first)
    return {"first": young[0], "slices": training.readings(slices, scrape_seconds), "running": not config.disabled}


@contextmanager
def scraping(url: str | None, seconds: float) -> Iterator[None]:
    """Scrape from another process, once in so many seconds, until the block ends."""
    scraper = subprocess.Popen([sys.executable, "-c", _SCRAPER, str(url), str(seconds)])
    try:
        yield
    finally:
        scraper.kill()
        scraper.wait()


def _launched_beside() -> list[int]:
    """TraceML's launcher and all processes that it has started, except this one and its parents up to the launcher."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # the process has ended
    above = [os.getpid()]
    while "traceml_ai.launcher" not in _command(above[-1]) and above[-1] > 1:
        above.append(parents[above[-1]])
    launcher, beside = above[-1], []
    for pid in parents:
        line = [pid]
        while line[-1] not in {launcher, 0}:
            line.append(parents.get(line[-1], 0))
        if line[-1] == launcher and os.getpid() not in line:
            beside.append(pid)
    return beside


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


class Training:
    """A training loop with workers. Its steps wait more than they compute, like the steps of a GPU.

    Args:
        workers: of the loader.
        step: wraps each step.
        beside: processes whose CPU time counts, too.

    Attributes:
        steps: that were read.
    """

    def __init__(
        self, workers: int, step: Callable[[torch.nn.Module], Step] = nullcontext, beside: Sequence[int] = ()
    ) -> None:
        torch.set_num_threads(1)
        self._batches = iter(DataLoader(Samples(), batch_size=4, num_workers=workers))
        self._step = step
        self._beside = beside
        self.steps = 0
        self._model = torch.nn.Linear(1, 1)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    def run(self, seconds: float) -> int:
        """Train. Returns the number of steps."""
        end = time.perf_counter() + seconds
        steps = 0
        while time.perf_counter() < end:
            batch = next(self._batches)
            with self._step(self._model):
                self._model(batch.mean().reshape(1, 1)).backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                time.sleep(_STEP_SECONDS)
            steps += 1
        return steps

    def settle(self, slice_seconds: float) -> None:
        """Train until nothing is imported any more. Not before readings that are as short as in a test."""
        self.run(_SETTLE_SECONDS if slice_seconds > 1.0 else 0.0)

    def readings(self, slices: int, seconds: float) -> list[dict[str, float]]:
        """Train. Returns the shares of a core of the threads and processes that were added, in each slice."""
        found: list[dict[str, float]] = []
        before, began = cpu_seconds(self._beside), time.perf_counter()
        for _ in range(slices):
            self.steps += self.run(seconds)
            after, ended = cpu_seconds(self._beside), time.perf_counter()
            found.append({name: (used - before.get(name, 0.0)) / (ended - began) for name, used in after.items()})
            before, began = after, ended
        return found


def cpu_seconds(beside: Sequence[int] = ()) -> dict[str, float]:
    """CPU time by name of the thread, of all threads that do not exist without an agent.

    Under `BESIDE` it has the CPU time of processes ``beside``, if there are any.
    """
    spent: dict[str, float] = {}
    for pid in beside:
        tasks = Path(f"/proc/{pid}/task").glob("*")
        spent[BESIDE] = spent.get(BESIDE, 0.0) + sum(map(_task_seconds, tasks))
    own = sys.modules.get("telemetry.safety.threads")  # `threading` does not know these
    threads = [(thread.name, thread.native) for thread in own._running.values()] if own is not None else []
    for thread in threading.enumerate():
        loaders = thread.name.startswith(_LOADER_THREADS)
        if thread is not threading.main_thread() and not loaders and thread.native_id is not None:
            threads.append((thread.name, thread.native_id))
    for name, native in threads:
        try:
            seconds = _task_seconds(Path(f"/proc/self/task/{native}"))
        except OSError:
            continue  # the thread has ended
        spent[name] = spent.get(name, 0.0) + seconds
    return spent


def _task_seconds(task: Path) -> float:
    """From schedstat, in nanoseconds, if the kernel has it; else from stat, in ticks of 10 ms."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- a node of several ranks -----------------------------------------------------------------------------------------


def measure_node(*, ranks: int, workers: int, slices: int, slice_seconds: float = SLICE_SECONDS) -> dict[str, Any]:
    """Shares of a core of all ranks of a node together. Each is a process with the agent. One scrape a second."""
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as folder:
        parameters = {"workers": workers, "slices": slices, "slice_seconds": slice_seconds, "run_dir": f"{folder}/run"}
        answers = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        command = [sys.executable, "-m", "benchmarks.agent_cpu", json.dumps(parameters)]
        processes = [
            subprocess.Popen(
                [*command, str(answer), "rank"],
                env=child.environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
                stderr=subprocess.DEVNULL,
            )
            for rank, answer in enumerate(answers)
        ]
        for process in processes:
            process.wait(child.TIMEOUT_SECONDS)
        readings = [json.loads(answer.read_text())["slices"] for answer in answers]
    return {"slices": [[sum(reading[at].values()) for reading in readings] for at in range(slices)]}


def measure_rank(*, run_dir: str, slices: int, workers: int, slice_seconds: float) -> dict[str, Any]:
    """One rank's part of the measurement. Rank 0 starts the scraper."""
    import telemetry

    agent: Any = telemetry.start(run_dir, run="node", port=0, start_line=False)
    with scraping(agent.metrics_url, 1.0) if agent.identity.rank == 0 else nullcontext():
        training = Training(workers)
        training.settle(slice_seconds)
        readings = training.readings(slices, slice_seconds)
    telemetry.stop()
    return {"slices": readings}


if __name__ == "__main__":
    roles: dict[str, Callable[..., dict[str, Any]]] = {
        "rank": measure_rank, "node": measure_node, "life": measure_life,
    }  # fmt: skip
    if len(sys.argv) == 1:  # by hand
        for reading in measure(slices=5, workers=8)["slices"]:
            print(", ".join(f"{name} {100 * share:.2f} % of a core" for name, share in reading.items()))
    else:
        child.answer(roles[sys.argv[3]] if len(sys.argv) > 3 else measure)
