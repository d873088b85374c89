"""A real Prometheus server and real jobs: discovery, the series when a rank dies, and correct sums."""

import os
import shutil
import signal
import time
from datetime import datetime

import pytest

from stack.jobs import scrape, wait_for
from tests.faults.processes import ranks_in

pytestmark = pytest.mark.stack

TAKEOVER_SECONDS = 3.0


def shown(page):
    """The ranks on a page."""
    return sorted(int(rank) for rank in ranks_in(page))


def lose_the_server(job, prometheus, end, *, shown_on):
    """End the rank that serves; the port, the scrapes and the series of the others go on. Returns rank and seconds.

    Args:
        shown_on: whether the rank that ends is to be shown on by the others, as ended.
    """
    serving = wait_for("a rank that listens", lambda: (rank := job.server()) is not None and [rank])[0]
    before = prometheus.by_rank('training_steps_total{job="side_by_side"}')
    ranks = sorted(before) if shown_on else sorted(before.keys() - {serving})
    began, began_unix = time.monotonic(), time.time()
    end(serving)

    def goes_on():
        seen = scrape(job.port)
        ended = {int(rank) for rank, value in ranks_in(seen, "training_run_ended").items() if value}
        return shown(seen) == ranks and (serving in ended) == shown_on and job.server() != serving

    wait_for("another rank at the same port", goes_on, 10, every=0.02)
    seconds = time.monotonic() - began

    def recovered():
        up = prometheus.query('up{job="side_by_side"}')
        steps = prometheus.by_rank('training_steps_total{job="side_by_side"}')
        fresh = prometheus.by_rank('timestamp(training_steps_total{job="side_by_side"})')
        assert [float(u["value"][1]) for u in up] == [1.0], up
        assert sorted(steps) == ranks, steps  # a lost rank's series is stale, not merely old
        assert min(fresh.values()) > began_unix + seconds, fresh
        return all(steps[rank] > before[rank] for rank in ranks if rank != serving)

    wait_for("Prometheus to go on", recovered, 15)
    down = prometheus.query('count_over_time(up{job="side_by_side"}[15s]) - sum_over_time(up{job="side_by_side"}[15s])')
    assert float(down[0]["value"][1]) <= TAKEOVER_SECONDS + 1, "failed scrapes, one a second"
    return serving, seconds


def test_another_rank_takes_the_port_over(prometheus, side_by_side, launch, record_property):
    job = side_by_side
    four_ranks = lambda: len(prometheus.by_rank('training_steps_total{job="side_by_side"}')) == 4
    wait_for("four ranks", four_ranks)
    target = job.targets()
    assert target[0]["targets"] == [f"127.0.0.1:{job.port}"]

    def kill(rank):
        os.kill(job.pids()[rank], signal.SIGKILL)

    def stop(rank):
        (launch.folder / f"side_by_side.stop-{rank}").touch()

    killed, seconds = lose_the_server(job, prometheus, kill, shown_on=False)
    record_property("takeover_seconds_after_sigkill", round(seconds, 2))
    assert seconds < TAKEOVER_SECONDS

    ended, seconds = lose_the_server(job, prometheus, stop, shown_on=True)
    record_property("takeover_seconds_after_end", round(seconds, 2))
    assert seconds < TAKEOVER_SECONDS + 2, "with the end of the training itself"
    assert prometheus.by_rank('training_run_ended{job="side_by_side"} == 1') == {ended: 1}
    assert job.targets() == target

    shutil.rmtree(job.board)  # as systemd does at a user's logout
    remaining = sorted({0, 1, 2, 3} - {killed, ended})
    wait_for("the board again", lambda: shown(scrape(job.port)) == remaining, 10)

    for rank in remaining:
        stop(rank)
    codes = job.wait()
    assert codes == [-signal.SIGKILL if rank == killed else 0 for rank in range(4)]
    assert list(job.run_dir.glob("targets/*")) == []
    assert not job.board.exists()
    lines = [line for line in job.stderr.splitlines() if line and not line.startswith("telemetry: run ")]
    said = [line for line in lines if not line.startswith("  ")]  # without the table
    assert len(said) == (killed != 0), "rank 0 ends with its verdict, unless it was killed"
    assert all("; see: telemetry report" in line for line in said)


# From here on the job of this folder runs, which uses the cores.


@pytest.mark.parametrize("found_by", ["static", "file_sd"])
def test_sees_all_ranks_of_the_job(prometheus, job, found_by):
    steps = wait_for(
        "steps of four ranks in Prometheus",
        lambda: len(found := prometheus.query(f'training_steps_total{{job="{found_by}"}} > 0')) == 4 and found,
    )

    for rank, series in enumerate(sorted((s["metric"] for s in steps), key=lambda labels: labels["rank"])):
        expected = {
            "__name__": "training_steps_total",
            "run": job.run_dir.name,
            "rank": str(rank),
            "job": found_by,
            "instance": f"127.0.0.1:{job.port}",
        }
        if found_by == "file_sd":
            expected["node"] = job.targets()[0]["labels"]["node"]
        assert series == expected
    infos = prometheus.query(f'training_run_info{{job="{found_by}"}}')
    assert sorted((i["metric"]["rank"], i["metric"]["local_rank"], i["metric"]["world_size"]) for i in infos) == [
        (str(rank), str(rank), "4") for rank in range(4)
    ]
    assert prometheus.query(f'scrape_samples_scraped{{job="{found_by}"}}')[0]["value"][1] != "0"


def test_ledger_grows_as_the_wall_clock_does(prometheus, job):
    window = 40  # seconds: a state is up to four intervals old, in a calm run
    of_window = f'{{job="static"}}[{window}s]'

    def stepped_throughout():
        assert job.running(), job.stderr
        counts = prometheus.by_rank(f"count_over_time(training_steps_total{of_window})")
        first = prometheus.by_rank(f"min_over_time(training_steps_total{of_window})")
        return min(counts.values()) >= window - 1 and min(first.values()) > 20 and len(first) == 4

    wait_for("a full window", stepped_throughout, window + 40, every=0.5)
    # The slope of all samples: increase() guesses what lies between a sample and the edge of the window.
    slope = prometheus.by_rank(f"sum by (rank) (deriv(training_time_seconds_total{of_window}))")
    assert slope == {rank: pytest.approx(1, rel=0.01) for rank in range(4)}
    growth = prometheus.by_rank(f"sum by (rank) (increase(training_time_seconds_total{of_window})) / {window}")
    assert growth == {rank: pytest.approx(1, rel=0.05) for rank in range(4)}

    lines = [line for line in job.logs() if line["event"] == "run_start"]
    started = {line["rank"]: datetime.fromisoformat(line["started"].replace("Z", "+00:00")) for line in lines}

    def whole():  # a busy machine may make one state late, but not each
        sums = prometheus.by_rank('sum by (rank) (training_time_seconds_total{job="static"})')
        scraped = prometheus.by_rank('max by (rank) (timestamp(training_time_seconds_total{job="static"}))')
        wall = {rank: scraped[rank] - started[rank].timestamp() for rank in range(4)}
        assert sums == {rank: pytest.approx(wall[rank], rel=0.01) for rank in range(4)}
        return True

    wait_for("sums that are the wall clock", whole, 10, every=0.5)


def test_waiting_shows_on_the_slow_rank_alone(prometheus, job):
    waited = prometheus.by_rank(
        'sum by (rank) (rate(training_time_seconds_total{job="static", category="data_wait"}[15s]))'
    )
    exposed = prometheus.by_rank('rate(training_exposed_wait_seconds_total{job="static"}[15s])')

    assert waited[2] > 0.5 > 10 * max(waited[rank] for rank in (0, 1, 3))
    assert exposed == {rank: pytest.approx(waited[rank], abs=0.02) for rank in range(4)}
