"""Measures what a fleet costs one Prometheus: series, memory, CPU, and the time of each dashboard query.

A process serves the real exposition of simulated ranks, one target per node. A real Prometheus scrapes it with the
shipped configuration and evaluates the shipped rules. Then every query of every dashboard is run, alternately as it is
and with the names of recording rules replaced by their expressions.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import child, grafana, machine, report, spread
from benchmarks.fleet_prometheus import Prometheus, QueryError, inlined, recording_rules, write_configuration
from benchmarks.fleet_ranks import fleet
from benchmarks.report import Row

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS: Final = Path(__file__).parent / "results"
LARGE: Final = 10_000
"""Number of ranks that the figures are extrapolated to."""

SCRAPE_SECONDS: Final = 15
_LOOK_SECONDS: Final = 5.0
_ROUNDS: Final = 3
_GIB: Final = 2**30


@dataclass(slots=True)
class Usage:
    """What Prometheus used while it scraped, one value per sample.

    Attributes:
        resident_bytes: memory. ``cores``: CPU seconds per second since the last sample. ``samples``: scraped samples
            per second, likewise.
        rules_seconds: duration of the evaluations of all rules between two scrapes, one after another.
        rule_seconds: the same of each rule, by its name.
    """

    resident_bytes: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    rules_seconds: list[float] = field(default_factory=list)
    rule_seconds: dict[str, list[float]] = field(default_factory=dict)

    def look(self, prometheus: Prometheus, seconds: float) -> None:
        """Sample for ``seconds``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            at, cpu, samples = time.monotonic(), prometheus.usage()[0], _appended(prometheus)
            time.sleep(min(SCRAPE_SECONDS, max(_LOOK_SECONDS, end - at)))  # so that every target is scraped once
            after, resident = prometheus.usage()
            passed = time.monotonic() - at
            self.resident_bytes.append(resident)
            self.cores.append((after - cpu) / passed)
            self.samples.append((_appended(prometheus) - samples) / passed)
            rules = prometheus.rule_seconds(SCRAPE_SECONDS)
            self.rules_seconds.append(sum(rules.values()))
            for name, took in rules.items():
                self.rule_seconds.setdefault(name, []).append(took)


def targets(ranks: int, ranks_per_node: int, port: int) -> list[dict[str, object]]:
    """The target file of a fleet. Its nodes are paths at one port."""
    return [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {
                "node": node[0].node,
                "instance": f"{node[0].node}:9464",
                "__metrics_path__": f"/{node[0].node}/metrics",
            },
        }
        for node in fleet(ranks, ranks_per_node, 0.0)
    ]


def cost_rows(prometheus: Prometheus, usage: Usage, ranks: int) -> list[Row]:
    """The cost of the scrapes and the rules, and the same extrapolated to a large fleet."""
    scraped = _scalar(prometheus, "sum(scrape_samples_scraped)") / ranks
    recorded = _scalar(prometheus, 'count({__name__=~".+:.+:.+"})') / ranks
    durations = [float(series["value"][1]) for series in prometheus.query("scrape_duration_seconds")]
    section = f"One Prometheus, {ranks} ranks"
    rows = [
        Row(section, "series of a rank", "", spread.spread([scraped])),
        Row(section, "recorded series of a rank", "", spread.spread([recorded])),
        Row(section, "series in memory", "", spread.spread([prometheus.own("prometheus_tsdb_head_series")])),
        Row(section, "samples a second", "", spread.spread(usage.samples)),
        Row(section, "scrape of a node", "ms", spread.spread(durations).scaled(1e3), note="with the time to render it"),
        Row(section, "CPU", "cores", spread.spread(usage.cores), note="scrapes, rules and alerts"),
        Row(section, "resident memory", "GiB", spread.spread(usage.resident_bytes).scaled(1 / _GIB)),
        Row(section, "all rules", "s", spread.spread(usage.rules_seconds), note=f"in {SCRAPE_SECONDS} s"),
        Row(
            section,
            "evaluations missed",
            "",
            spread.spread([prometheus.own("prometheus_rule_group_iterations_missed_total")]),
        ),
    ]
    section = f"What that means for {LARGE} GPUs"
    factor = LARGE / ranks
    note = f"{factor:.3g} times as much"
    rows += [
        Row(section, "series in memory", "", rows[2].figure and rows[2].figure.scaled(factor), note=note),
        Row(section, "samples a second", "", spread.spread(usage.samples).scaled(factor), note=note),
        Row(section, "CPU", "cores", spread.spread(usage.cores).scaled(factor), note=note),
        Row(section, "resident memory", "GiB", spread.spread(usage.resident_bytes).scaled(factor / _GIB), note=note),
        Row(section, "all rules", "s", spread.spread(usage.rules_seconds).scaled(factor), note=note),
    ]
    each = {name: spread.spread(took).scaled(1e3) for name, took in usage.rule_seconds.items()}
    dearest = sorted(each, key=lambda name: -each[name].median)
    return rows + [Row(f"Each rule in {SCRAPE_SECONDS} s, dearest first", name, "ms", each[name]) for name in dearest]


@dataclass(slots=True)
class Timing:
    """One query's seconds, as it is and without recording rules.

    Attributes:
        query: the query. ``expression``: with its variables replaced. ``inlined``: without recorded names.
        ours: seconds. ``raw``: seconds of the inlined expression; empty if it is the same expression.
        note: why a time is missing, or that the two do not return the same series.
    """

    query: grafana.Query
    expression: str
    inlined: str
    ours: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    note: str = ""

    def ask(self, prometheus: Prometheus, end: float, range_seconds: int, step: int | None) -> None:
        """Run the query once.

        Raises:
            QueryError: it was not answered.
        """
        seconds, series = prometheus.timed(self.expression, end, range_seconds, step)
        self.ours.append(seconds)
        if self.inlined != self.expression:
            seconds, of_inlined = prometheus.timed(self.inlined, end, range_seconds, step)
            self.raw.append(seconds)
            if of_inlined != series:
                self.note = f"{series} series, and {of_inlined} without rules"


def time_queries(prometheus: Prometheus, range_seconds: int, rounds: int) -> list[Timing]:
    """Run every query of every dashboard, alternately with and without recording rules."""
    rules, metrics = recording_rules(), set(prometheus.values("__name__", '{job="training"}'))
    metrics -= rules.keys()
    timings = []
    for name, dashboard in grafana.load().items():
        values = _choice(prometheus, dashboard) | grafana.times(range_seconds, SCRAPE_SECONDS, SCRAPE_SECONDS)
        for query in grafana.queries_of(name, dashboard):
            expression = grafana.substituted(query.expression, values)
            raw = inlined(expression, rules, metrics, f"{SCRAPE_SECONDS}s")
            timing = Timing(query, expression, raw)
            timings.append(timing)
            step, end = None if query.instant else SCRAPE_SECONDS, time.time()
            try:
                for _ in range(rounds):
                    timing.ask(prometheus, end, range_seconds, step)
            except QueryError as error:
                timing.note = str(error)
    return timings


def query_rows(timings: Sequence[Timing]) -> list[Row]:
    """Rows for all queries of a dashboard one after another, and for each of them."""
    rows = []
    for name in dict.fromkeys(timing.query.dashboard for timing in timings):
        mine = [timing for timing in timings if timing.query.dashboard == name and timing.ours]
        section = f"Dashboard {name}, all its queries one after another"
        both = [timing for timing in mine if timing.raw]
        ours = [sum(times) for times in zip(*(timing.ours for timing in mine), strict=False)]
        with_rules = [sum(times) for times in zip(*(timing.ours for timing in both), strict=False)]
        without = [sum(times) for times in zip(*(timing.raw for timing in both), strict=False)]
        rows.append(Row(section, f"{len(mine)} queries", "s", spread.spread(ours) if ours else None))
        if both:
            ratio = spread.ratio_of_medians(without, with_rules)
            rows += [
                Row(section, f"{len(both)} of them read recorded series", "s", spread.spread(with_rules)),
                Row(section, "the same without recording rules", "s", spread.spread(without)),
                Row(section, "without / with", "x", ratio),
            ]
    for timing in sorted(timings, key=lambda timing: -max(timing.ours, default=0.0)):
        notes = [timing.note] if timing.note else []
        if timing.raw:
            raw = spread.spread(timing.raw)
            times_as_long = raw.median / spread.spread(timing.ours).median
            notes.insert(0, f"without rules {raw.median * 1e3:.3g} ms, {times_as_long:.2g} x")
        figure = spread.spread(timing.ours).scaled(1e3) if timing.ours else None
        rows.append(Row("Each query, slowest first", timing.query.key, "ms", figure, note="; ".join(notes)))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=10.0, help="of scraping before it is asked (%(default)s)")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="of each query (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(argv)
    about = machine.describe()
    try:
        rows = measure(options.ranks, options.ranks_per_node, options.minutes * 60, options.rounds)
    except child.ChildError as error:
        print(f"bench-fleet: {error}", file=sys.stderr)
        return 1
    nodes = -(-options.ranks // options.ranks_per_node)
    about["effort"] = (
        f"{options.ranks} ranks on {nodes} nodes, scraped every {SCRAPE_SECONDS} s for {options.minutes:g} min, "
        f"graphs over that time, {options.rounds} rounds of each query"
    )
    print(report.text(about, rows))
    title = "What a fleet costs one Prometheus"
    for path in report.write(options.output, machine.slug(about), about, rows, name="fleet", title=title):
        print(f"written: {path.name}")
    return 0


def measure(ranks: int, ranks_per_node: int, seconds: float, rounds: int) -> list[Row]:
    """Serve, scrape, sample and query.

    Raises:
        ChildError: Prometheus or the endpoints do not start.
    """
    command = [sys.executable, "-m", "benchmarks.fleet_ranks", str(ranks), str(ranks_per_node)]
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as folder:
        server = subprocess.Popen(command, env=child.environment(), stdout=subprocess.PIPE, text=True)
        try:
            port = int(server.stdout.readline() or 0) if server.stdout is not None else 0
            if not port:
                raise child.ChildError("the endpoints do not start")
            configuration = write_configuration(Path(folder), targets(ranks, ranks_per_node, port))
            prometheus = Prometheus(configuration, _free_port())
            try:
                usage = Usage()
                Usage().look(prometheus, seconds / 2)  # until the rules' windows are full and memory has grown
                usage.look(prometheus, seconds / 2)
                rows = cost_rows(prometheus, usage, ranks)
                rows += query_rows(time_queries(prometheus, int(seconds), rounds))
            finally:
                prometheus.stop()
        finally:
            server.terminate()
            server.wait()
    return rows


def _choice(prometheus: Prometheus, dashboard: dict[str, object]) -> dict[str, str]:
    """Values of a dashboard's variables: the first value if it takes one, else all values."""
    values: dict[str, str] = {}
    for variable in grafana.variables_of(dashboard):
        text = variable["query"] if isinstance(variable["query"], str) else variable["query"]["query"]
        selector, _, label = text.removeprefix("label_values(").removesuffix(")").rpartition(",")
        options = prometheus.values(label.strip(), grafana.substituted(selector, values))
        several = variable.get("multi")
        values[variable["name"]] = (
            grafana.every(variable, options) if several else grafana.chosen(variable, options[:1])
        )
    return values


def _scalar(prometheus: Prometheus, expression: str) -> float:
    return sum(float(series["value"][1]) for series in prometheus.query(expression))


def _appended(prometheus: Prometheus) -> float:
    return prometheus.own("prometheus_tsdb_head_samples_appended_total")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    raise SystemExit(main())
