"""`telemetry top --url`: the same view from expositions, of endpoints that may be dead, slow or hostile."""

from __future__ import annotations

import pytest
from top_screens import FRAME

from telemetry.top.endpoints import Endpoints, ScrapeError, fetch
from telemetry.top.view import State

URL = "http://127.0.0.1:1/metrics"


def exposition(seconds: float, *, wait: float = 0.0, cause: str = "", rank: int = 0, **more: float) -> str:
    labels = f'run="r",rank="{rank}"'
    lines = [
        "# HELP training_run_info about",
        f'training_run_info{{{labels},node="n{rank}",local_rank="0",world_size="2"}} 1.0',
        f"training_steps_total{{{labels}}} {10 * seconds}",
        f'training_time_seconds_total{{{labels},category="data_wait"}} {wait}',
        f'training_time_seconds_total{{{labels},category="compute"}} {seconds - wait}',
        f'training_compute_seconds_total{{{labels},part="backward"}} {0.6 * (seconds - wait)}',
        f"training_exposed_wait_seconds_total{{{labels}}} {wait}",
        f'training_gpu_utilization_ratio{{{labels},gpu="0",uuid="u"}} 0.42',
        f'training_gpu_utilization_ratio{{{labels},gpu="1",uuid="v"}} 0.99',  # of several the first is shown
        f'training_stall_active{{{labels},cause="gc_pause"}} {int(cause == "gc_pause")}',
    ]
    return "\n".join([*lines, *(f"{name}{{{labels}}} {value}" for name, value in more.items())]) + "\n"


def views(*texts: str):
    """The views after each of some expositions of one endpoint."""
    queue = list(texts)
    endpoints = Endpoints([URL], read=lambda _: queue.pop(0))
    return [endpoints.poll() for _ in texts]


def test_a_rank_between_two_expositions():
    _, view = views(exposition(100, wait=1), exposition(110, wait=7))
    (row,) = view.rows
    assert (row.rank, row.node, row.totals.steps_total, row.now_in) == (0, "n0", 1100, "data_wait")
    assert row.wait_ratio == pytest.approx(0.6)
    assert row.per_second("steps") == pytest.approx(10)
    assert row.gpu.utilization_ratio == 0.42
    assert "compute: backward 60 %, not split 40 %" in "".join(
        text for line in FRAME.rank_lines(row, 80, 0.0) for text, _ in line
    )
    assert view.headline.text.startswith("Starved: rank 0 spent 60 % of its training loop waiting for data")
    assert view.notes == ("nothing is known of rank 1: the job has 2 ranks",)


def test_a_stall_has_a_cause_and_where_to_look():
    _, stalled, over = views(
        exposition(100, wait=1), exposition(110, wait=2, cause="gc_pause"), exposition(120, wait=3)
    )
    assert stalled.rows[0].finding == "gc_pause"
    assert "run telemetry report or top on the run folder" in stalled.newest_stall()[1].advice[0].action
    assert over.rows[0].state == State.OK


def test_a_hang_names_the_rank():
    _, view = views(
        exposition(100, wait=1),
        exposition(110, wait=1, training_hang_suspect_rank=0.0)
        + 'training_hang_active{run="r",rank="0",kind="fetch"} 1\n',
    )
    assert view.headline.text.startswith("Hangs: the job goes no further (fetch); the others wait for rank 0")
    assert view.rows[0].state == State.STUCK


def test_a_dead_endpoint_is_named_and_the_others_are_shown():
    def read(url: str) -> str:
        if url == URL:
            raise ScrapeError(f"{url} does not answer: refused")
        return exposition(100, rank=1)

    endpoints = Endpoints([URL, "http://other:9464/metrics"], read=read)
    view = endpoints.poll()
    assert view.notes[0] == f"{URL} does not answer: refused"
    assert [row.rank for row in view.rows] == [1]


def test_nothing_listens_there():
    endpoints = Endpoints([URL])
    view = endpoints.poll()
    assert view.headline.text.startswith("Waiting for the endpoints")
    assert "does not answer" in view.notes[0]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:9464", "http://[", "http://h:x/", "ftp://h/"])
def test_a_url_that_is_none(url):
    with pytest.raises(ScrapeError):
        fetch(url)


@pytest.mark.parametrize(
    "text",
    [
        "training_steps_total 5",
        'training_steps_total{run="r",rank="x"} 5',
        'training_steps_total{run="r",rank="0"} nan',
        'training_steps_total{run="r",rank="0"} five',
        'training_steps_total{run="r",rank="99999999"} 5',
        "\x00\xff" * 100,
        'training_steps_total{run="r",rank="0"',
    ],
)
def test_damaged_expositions_have_no_rank(text):
    (view,) = views(text)
    assert not view.rows
