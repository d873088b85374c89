"""Measures what a scrape costs: the scraper's wait, and the steps of the training process that serves it.

The training process is rank 0 of a node of eight, with the real agent. It leads the node and serves all ranks. One
helper process puts the numbers of the other seven ranks on the same board once a second.
Another process scrapes, with one or several clients. Quiet and scraped segments of the same loop alternate.

``python -m benchmarks.scrape`` prints how many times as long the steps take while clients ask 480 times a second.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
import types
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks import child
from benchmarks.spread import of_groups, ratio_of_medians

if TYPE_CHECKING:
    from telemetry.node.metrics import RunView

RANKS: Final = 8
FLOOD: Final[dict[str, Any]] = {"hertz": 480.0, "clients": 8}
"""Far more scrapes than any server of metrics sends."""

_STEP_MS: Final = 3.0
_SETTLE_SECONDS: Final = 2.0
_WAIT_SECONDS: Final = 10.0


# -- the training process --------------------------------------------------------------------------------------------


def measure(*, pairs: int, segment_seconds: float, hertz: float, clients: int = 1) -> dict[str, Any]:
    """Durations of the steps in quiet and scraped segments, and of each scrape, in nanoseconds.

    Args:
        pairs: number of quiet segments, and of scraped ones.
        segment_seconds: length of each.
        hertz: scrapes a second, of all clients together.
        clients: how many scrape at the same time.
    """
    import torch

    import telemetry

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as run_dir:
        agent: Any = telemetry.start(run_dir, port=0, start_line=False)
        helper = _spawn("ranks", agent.identity.run, str(Path(run_dir).absolute()), agent.identity.node)
        try:
            _wait_for_ranks(agent.metrics_url)
            train = _Training()
            train.run(_SETTLE_SECONDS)
            quiet, scraped, gets = [], [], []
            for pair in range(pairs):
                for scrape in (False, True) if pair % 2 else (True, False):
                    if scrape:
                        scraper = _spawn("scrape", agent.metrics_url, str(hertz), str(segment_seconds), str(clients))
                        scraped.append(train.run(segment_seconds))
                        gets.append(json.loads(scraper.communicate(timeout=_WAIT_SECONDS)[0]))
                    else:
                        quiet.append(train.run(segment_seconds))
        finally:
            telemetry.stop()
            helper.terminate()
            helper.wait(_WAIT_SECONDS)
    return {
        "quiet": [[end - start for start, end in steps] for steps in quiet],
        "scraped": [[end - start for start, end in steps] for steps in scraped],
        "met": [_met(steps, each["gets"]) for steps, each in zip(scraped, gets, strict=True)],
        "latencies": [end - start for each in gets for start, end in each["gets"]],
        "failed": sum(each["failed"] for each in gets),
        "bytes": gets[-1]["bytes"],
        "samples": gets[-1]["samples"],
    }


class _Training:
    """A small real training loop, over an iterator that the agent observes."""

    def __init__(self) -> None:
        from benchmarks import loops

        self._loop = loops.ColdLoop("cpu", sites=("next",), step_ms=_STEP_MS)
        self._iterator = iter(loops.EndlessLoader(self._loop.images))

    def run(self, seconds: float) -> list[tuple[int, int]]:
        """Train for ``seconds``. Returns the start and the end of each step."""
        net, optimizer, iterator = self._loop.net, self._loop.optimizer, self._iterator
        steps = []
        start = time.perf_counter_ns()
        stop = start + int(seconds * 1e9)
        while start < stop:
            images = next(iterator)
            optimizer.zero_grad()
            net(images).backward()
            optimizer.step()
            end = time.perf_counter_ns()
            steps.append((start, end))
            start = end
        return steps


def _met(steps: list[tuple[int, int]], gets: list[list[int]]) -> dict[str, list[int]]:
    """The steps during which a scrape was in progress, and the others. All processes use the same clock."""
    met: dict[str, list[int]] = {"during": [], "between": []}
    for start, end in steps:
        hit = any(asked < end and start < answered for asked, answered in gets)
        met["during" if hit else "between"].append(end - start)
    return met


def _spawn(role: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.scrape", role, *arguments]
    return subprocess.Popen(command, env=child.environment(), stdout=subprocess.PIPE)


def _wait_for_ranks(url: str) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    wanted = [f'rank="{rank}"'.encode() for rank in range(RANKS)]
    while not all(map(_get(url).__contains__, wanted)):
        if time.monotonic() > end:
            raise TimeoutError("the other ranks' states did not appear on the board")
        time.sleep(0.1)


# -- the scraping process --------------------------------------------------------------------------------------------


def scrape_together(url: str, hertz: float, seconds: float, clients: int) -> dict[str, Any]:
    """Let several clients `scrape`, so many times a second together."""
    with ThreadPoolExecutor(clients) as pool:
        found = [*pool.map(lambda _: scrape(url, hertz / clients, seconds), range(clients))]
    each = found[0]
    gets = [get for one in found for get in one["gets"]]
    return {**each, "gets": gets, "failed": sum(one["failed"] for one in found)}


def scrape(url: str, hertz: float, seconds: float) -> dict[str, Any]:
    """Get the metrics at regular intervals, each time over a new connection."""
    gets: list[tuple[int, int]] = []
    failed, body = 0, b""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        asked = time.perf_counter_ns()
        try:
            body = _get(url)
            gets.append((asked, time.perf_counter_ns()))
        except OSError:
            failed += 1
        time.sleep(max(0.0, 1 / hertz - (time.perf_counter_ns() - asked) / 1e9))
    lines = [line for line in body.splitlines() if line and not line.startswith(b"#")]
    return {"gets": gets, "failed": failed, "bytes": len(body), "samples": len(lines)}


def _get(url: str) -> bytes:
    """The body at a URL.

    Raises:
        OSError: it could not be read.
    """
    address, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(address, timeout=_WAIT_SECONDS)
    try:
        connection.request("GET", f"/{path}")
        response = connection.getresponse()
        body = response.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from None
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise OSError(f"status {response.status}")
    return body


# -- the other ranks -------------------------------------------------------------------------------------------------


def publish_ranks(run: str, scope: str, node: str) -> None:
    """Put the states of ranks 1 to 7 on a board once a second, until terminated."""
    from telemetry.node.board import Board
    from telemetry.node.prometheus import numbers_of

    boards = {rank: Board(run, scope, node) for rank in range(1, RANKS)}  # each has one rank
    while True:
        view = full_view()
        for rank, board in boards.items():
            board.publish(rank, numbers_of(view))
        time.sleep(1.0)


def full_view() -> RunView:
    """A view in which everything is measured, of a rank with one GPU. No rank that does not hang publishes more."""
    from telemetry.node.metrics import RunView

    view: RunView = _filled(RunView, "view")
    return dataclasses.replace(view, hang=None, other_gpus=())


def _filled(hint: Any, name: str) -> Any:
    """A value of an annotated type with every field filled, including fields that are added later."""
    from telemetry.config import STEP_BUCKETS
    from telemetry.diagnosis import hangs
    from telemetry.diagnosis import memory_outlook as memory
    from telemetry.model import records, totals
    from telemetry.model.records import CATEGORIES, Histogram
    from telemetry.node import metrics

    if hint is Histogram:
        return Histogram(STEP_BUCKETS, tuple(range(1000, 1001 + len(STEP_BUCKETS))), 123456.789)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        # Modules import the records only for type checking, so their names are given here.
        modules = (records, totals, hangs, memory, metrics)
        names = {name: value for module in modules for name, value in vars(module).items()} | {"Histogram": Histogram}
        hints = typing.get_type_hints(hint, localns=names)
        return hint(**{field.name: _filled(hints[field.name], field.name) for field in dataclasses.fields(hint)})
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):  # none of them is in a metric as a whole
        needed = [field for field in msgspec.structs.fields(hint) if field.required]
        return hint(**{field.name: _filled(field.type, field.name) for field in needed})
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return _filled(next(each for each in arguments if each is not type(None)), name)
    if origin is dict:
        keys = CATEGORIES if "ledger" in name or "energy" in name else [f"{name}_{index}" for index in range(4)]
        return {key: _filled(arguments[1], key) for key in keys}
    if origin is tuple:
        return tuple(_filled(arguments[0], f"{name}_{index}") for index in range(6))
    return {bool: False, int: 123456789, float: 0.123456789, str: name}[hint]


def main(argv: list[str]) -> None:
    """Run one of the processes that this benchmark starts; by hand, measure under a flood of scrapes."""
    if not argv:
        answer = measure(pairs=5, segment_seconds=5.0, **FLOOD)
        quiet, scraped = (of_groups(answer[kind], statistics.mean) for kind in ("quiet", "scraped"))
        times, rate = ratio_of_medians(scraped, quiet), len(answer["latencies"]) / 25
        print(f"{FLOOD['hertz']:.0f} scrapes a second are asked for and {rate:.0f} answered: ", end="")
        print(f"steps take {times.median:.2f} times as long ({times.p10:.2f} to {times.p90:.2f}); ", end="")
        print(f"without scrapes, {statistics.median(quiet) / 1e6:.2f} ms")
    elif argv[0] == "ranks":
        publish_ranks(argv[1], argv[2], argv[3])
    elif argv[0] == "scrape":
        print(json.dumps(scrape_together(argv[1], float(argv[2]), float(argv[3]), int(argv[4]))))
    else:
        child.answer(measure, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
