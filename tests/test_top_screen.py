"""What `telemetry top` shows of a run, printed and on the screen, and what each key does. Textual's pilot stands in for
a terminal."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from top_runs import ADVICE, NOW, Run, iso, log_line, stall, start, window

from telemetry.top.text import chosen, printed, rank_lines, summary


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def table(text: str) -> list[str]:
    """The rows of the table in what is printed."""
    lines = text.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("rank "))
    return [line for line in lines[first + 1 :] if line.split()[0].isdecimal()]


# -- printed -----------------------------------------------------------------------------------------------------------


def test_what_is_printed_of_a_run(run):
    run.add_rank(0, wait=1.0)
    run.add_rank(1, stall(NOW - 60, "workers_cpu_bound", 1), wait=60.0)
    text = printed(run.view(), NOW)
    assert text.startswith("Starved: rank 1 spent 60 % of its training loop waiting for data")
    assert "run r  2 ranks on 1 node  1 stalled, 1 ok  step 50  0.50 steps/s  08:00:00 UTC" in text
    assert [" ".join(row.split()) for row in table(text)] == [
        "0 n1 ok compute 0.50 1% ################ -",
        "1 n1 workers_cpu_bound data wait 0.50 60% wwwwwwwwww###### -",
    ]
    assert "newest stall: rank 1: workers_cpu_bound, open for 60 s (since 07:59:00 UTC)" in text
    assert "  try num_workers=8: use more workers, predicted 1.9 times the steps per second (why)" in text


def test_of_many_ranks_the_worst_are_printed(run):
    for rank in range(70):
        run.add_rank(rank, wait=rank)
    text = printed(run.view(), NOW)
    assert [int(row.split()[0]) for row in table(text)] == [*range(69, 5, -1)]
    assert "the worst 64 of 70 ranks" in text


def test_columns_for_the_gpu_appear_with_figures(run):
    run.add_rank(0)
    assert "  gpu" not in printed(run.view(), NOW)
    run.add(log_line("gpu", NOW, utilization_ratio=0.42, memory_used_bytes=3, memory_total_bytes=4, power_watts=400))
    assert "  42%   75%   400 " in printed(run.view(), NOW)
    assert "GPU        busy 42 %, memory 3 B of 4 B, 400 W" in rank_lines(run.row(), NOW)


def test_an_opened_rank_has_its_ledger_its_compute_and_its_stalls(run):
    run.add_rank(0, stall(NOW - 60, "gc_pause"), wait=25.0, compute_total_seconds={"forward": 30.0, "backward": 45.0})
    lines = rank_lines(run.row(), NOW)
    assert lines[0] == "rank 0 on n1, pid 10: gc_pause, since 07:59:00 UTC (60 s)"
    assert "data wait            25.0 %        25.0 %" in lines
    assert "compute: forward 40 %, backward 60 %" in lines
    assert f"stall on rank 0: gc_pause, since {iso(NOW - 60)}, still open" in lines


def test_counted_samples_are_summed_where_each_rank_knows_its_own(run):
    run.add_rank(0, samples_total=2000, tokens_total=100)
    run.add_rank(1, samples_total=2250)
    text = summary(run.view(), NOW)
    assert "42.5 samples/s" in text
    assert "tokens/s" not in text
    assert "throughput 20 samples a second, 1 tokens a second" in rank_lines(run.row(), NOW)


def test_an_old_state_has_its_age(run):
    run.add_rank(0)
    view = run.view()
    assert summary(view, NOW + 9).endswith("08:00:09 UTC")
    assert summary(view, NOW + 40).endswith("08:00:00 UTC, 40 s ago")


@pytest.mark.parametrize(
    ("order", "ranks"),
    [
        ("worst first", [3, 1, 2, 0]),
        ("rank", [0, 1, 2, 3]),
        ("node", [1, 3, 0, 2]),
        ("slowest first", [2, 0, 1, 3]),
        ("wait", [3, 1, 2, 0]),
        ("GPU, idle first", [1, 0, 2, 3]),
        ("memory", [2, 0, 1, 3]),
    ],
)
def test_orders(run, order, ranks):
    gpu = [log_line("gpu", NOW, 0, "n2", utilization_ratio=0.9), log_line("gpu", NOW, 1, utilization_ratio=0.2)]
    host = log_line("host", NOW, 2, "n2", process_resident_memory_bytes=7)
    run.add_rank(0, gpu[0], node="n2", wait=1.0, steps=50)
    run.add_rank(1, gpu[1], node="n1", wait=9.0, steps=60)
    run.add_rank(2, host, node="n2", wait=5.0, steps=40)
    run.add_rank(3, node="n1", wait=19.0, steps=70)
    assert [row.rank for row in chosen(run.view().rows, order)] == ranks


HOSTILE = [
    "\x1b[2J\x1b]0;title\x07",
    "a\nb\rc",
    "\u202egnp.exe",
    "\u2028x",
    "\x9b31m",
    "[bold]x[/bold] [@click=app.quit]y[/]",
]


def hostile_run(path, hostile: str, now: float) -> Run:
    run = Run(path, now)
    advice = ADVICE | {"action": hostile, "because": hostile}
    found = stall(
        now - 60, hostile, node=hostile, advice=[advice], evidence={"stacks": [hostile], "line_verdict": hostile}
    )
    run.add(
        start(now - 90, node=hostile, world_size=3), log_line("gpu", now, node=hostile, name=hostile, utilization_ratio=0.5),
        log_line("window", now, node=hostile, steps_total=9, wall_seconds=90.0, ledger_total_seconds={hostile: 90.0}), found,
    )  # fmt: skip
    run.add(start(now - 90, 1), log_line("run_end", now, 1, exception=hostile, steps_total=9, wall_seconds=90.0,
                                         ledger_total_seconds={"compute": 90.0}), rank=1)  # fmt: skip
    return run


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_texts_reach_no_pipe(tmp_path, hostile):
    hostile_run(tmp_path / "run", hostile, time.time())
    command = [sys.executable, "-m", "telemetry", "top", "--once", str(tmp_path / "run")]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "newest stall" in text
    assert all(line.isprintable() for line in text.split("\n"))


# -- the screen --------------------------------------------------------------------------------------------------------


class Screen:
    """The app under a pilot. ``press`` returns what stands on the screen after some keys."""

    def __init__(self, app, pilot, run):
        self.app, self.pilot, self.run = app, pilot, run

    async def press(self, *keys):
        await self.pilot.press(*keys)
        await self.pilot.pause()
        return self.text()

    async def shows(self, text):
        """The screen, once a text stands on it."""
        for _ in range(1000):
            if text in self.text():
                return self.text()
            await self.pilot.pause(0.02)
        raise AssertionError(f"{text!r} did not appear:\n{self.text()}")

    def text(self):
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)

    def ranks(self):
        """The ranks in the table, in their order."""
        return [int(line.split()[0]) for line in self.text().splitlines() if line[:6].strip().isdecimal()]

    def cursor(self):
        """The rank under the cursor."""
        return self.app.shown[self.app._table.cursor_row].rank


def with_screen(test, run, size=(120, 30)):
    """Run a test with the app on a run; returns its exit status."""
    pytest.importorskip("textual")
    from telemetry.top.app import TopApp

    async def shown():
        app = TopApp(run.path)
        async with app.run_test(size=size, notifications=True) as pilot:
            screen = Screen(app, pilot, run)
            await screen.shows("worst first")
            await test(screen)
        return app.return_code

    status = asyncio.run(shown())
    join()
    return status


def join():
    """Wait for the thread that looks at the run."""
    for thread in threading.enumerate():
        if thread.name.startswith("telemetry-top"):
            thread.join(60)


@pytest.fixture
def ranks(tmp_path):
    """A run of six ranks: one is gone, one has a stall and one waits for it, one starves, two are all right."""
    run = Run(tmp_path / "run", now := time.time() + 60)  # a rank without news is silent, on a slow machine too early
    run.add_rank(0)
    run.add_rank(1, wait=10.0)
    run.add_rank(2, node="n2", ago=240.0)
    run.add_rank(3, stall(now - 60, "gc_pause", 3), wait=50.0)
    run.add_rank(4, stall(now - 50, "straggler", 4, "n2", evidence={"straggler_rank": 3}), node="n2")
    run.add_rank(5, wait=30.0)
    return run


def test_the_worst_rank_is_on_top_below_the_verdict(ranks):
    async def test(screen):
        text = await screen.shows("newest stall: rank 3 on n1: gc_pause, open for")
        assert text.startswith("Killed: rank 2 did not end by itself.")
        assert "run r  6 ranks on 2 nodes  1 gone, 1 stalled, 1 starved, 1 waiting, 2 ok" in text
        assert screen.ranks() == [2, 3, 5, 4, 1, 0]
        assert "\u2592" * 8 + "\u2588" * 8 in text
        assert " 15%" not in text
        ranks.add(window(ranks.now, 100.0, 1, wait=15.0, steps=50), rank=1)
        await screen.shows(" 15%")

    with_screen(test, ranks)


def test_keys_open_a_rank_and_go_back(ranks):
    async def test(screen):
        await screen.shows("gc_pause")
        await screen.press("down")
        for back in ("q", "escape", "left", "backspace", "enter"):
            assert "rank 3 on n1, pid 13: gc_pause" in await screen.press("enter")
            assert "newest stall" in await screen.press(back)
        await screen.press("q")

    assert with_screen(test, ranks) == 0


def test_help_shows_the_keys_and_the_columns(ranks):
    async def test(screen):
        await screen.shows("gc_pause")
        await screen.press("h")
        await screen.shows("state, worst first:")
        await screen.shows("trouble")
        assert "state, worst first:" not in await screen.press("question_mark")
        await screen.press("down", "enter", "h")
        await screen.shows("Scroll Down")
        assert "Scroll Down" not in await screen.press("h")

    with_screen(test, ranks)


def test_the_cursor_stays_on_its_rank_when_the_order_changes(ranks):
    async def test(screen):
        await screen.shows("gc_pause")
        await screen.press("down")
        ranks.add(log_line("stall_close", ranks.now, 3), rank=3)
        await screen.shows("waits for data  ")
        assert screen.ranks()[:2] == [2, 3]
        ranks.add(stall(ranks.now, "gc_pause", 5), rank=5)
        await screen.shows("newest stall: rank 5")
        assert screen.ranks()[:3] == [2, 5, 3]
        assert screen.cursor() == 3
        await screen.press("home")
        assert screen.cursor() == 2

    with_screen(test, ranks)


def test_keys_move_through_a_thousand_ranks(tmp_path):
    run = Run(tmp_path / "run", time.time() + 60)
    for rank in range(1000):
        run.add_rank(rank, wait=0.01 * rank)

    async def test(screen):
        await screen.shows("1000 ranks")
        for key, rank in (("G", 50), ("g", 950), ("j", 951), ("k", 950), ("end", 50)):
            await screen.press(key)
            assert screen.cursor() == rank
            assert rank in screen.ranks()

    with_screen(test, run)


def test_typing_a_text_to_find(ranks):
    async def test(screen):
        await screen.shows("gc_pause")
        await screen.press("slash", "n", "2", "x", "backspace")
        assert screen.ranks() == [2, 4]
        assert "find n2" in await screen.press("enter")
        await screen.press("escape")
        assert len(screen.ranks()) == 6
        await screen.press("slash", "z", "z")
        assert screen.ranks() == []
        await screen.press("enter", "n", "enter")  # there is nothing to ask about, or to open
        await screen.press("escape")
        assert len(screen.ranks()) == 6

    with_screen(test, ranks)


def test_only_ranks_in_trouble_other_orders_and_other_bars(ranks):
    async def test(screen):
        await screen.shows("gc_pause")
        assert "trouble only" in await screen.press("f")
        assert screen.ranks() == [2, 3, 5]
        await screen.press("f", "s")
        assert screen.ranks() == [0, 1, 2, 3, 4, 5]
        await screen.press("S", "S")
        assert "memory  \u2592" in screen.text()
        assert "last minute" in screen.text()
        assert "whole run" in await screen.press("t")

    with_screen(test, ranks)


def test_a_snapshot_is_asked_for_before(ranks):
    """The command says why there is none: the ranks of this run are no processes."""

    async def test(screen):
        await screen.shows("gc_pause")
        for key in ("q", "enter", "escape", "n"):
            assert "Request a snapshot of rank 2?" in await screen.press("n")
            assert "gc_pause" in await screen.press(key)
        await screen.press("down", "enter")
        assert "Request a snapshot of rank 3?" in await screen.press("n")
        await screen.press("y")
        await screen.shows("snapshot of rank 3 requested")
        await screen.shows("this run takes no snapshots")
        await screen.press("escape", "n", "a")
        await screen.shows("snapshot of all ranks requested")

    with_screen(test, ranks)


def test_a_failed_look_is_a_note_on_the_old_view_until_the_next(ranks, monkeypatch):
    from telemetry.top.run_folder import RunFolder

    looked, poll = [], RunFolder.poll

    def failing(folder):
        looked.append(1)
        if len(looked) == 2:
            raise ValueError("bad [line]\x1b[2J")
        return poll(folder)

    monkeypatch.setattr(RunFolder, "poll", failing)

    async def test(screen):
        text = await screen.shows("cannot be read: ValueError: bad [line]\\x1b[2J")
        assert "gc_pause" in text
        while "cannot be read" in screen.text():
            await screen.pilot.pause(0.02)
        assert "gc_pause" in screen.text()

    with_screen(test, ranks)


def test_the_time_alone_draws_one_line(ranks, monkeypatch):
    """A layout draws all of the screen. It is for news of the ranks, not for the clock, which goes each second."""
    pytest.importorskip("textual")
    from telemetry.top.app import Lines

    layouts, refresh = [], Lines.refresh

    def noting(lines, *regions, layout=False, **options):
        layouts.append(layout)
        return refresh(lines, *regions, layout=layout, **options)

    monkeypatch.setattr(Lines, "refresh", noting)

    async def test(screen):
        await screen.shows("gc_pause")
        screen.app._over.set()
        join()  # now nobody looks at the run
        await screen.pilot.pause()
        layouts.clear()
        while not layouts:
            await screen.pilot.pause(0.02)
        assert not any(layouts)
        assert "trouble only" in await screen.press("f")
        assert any(layouts)

    with_screen(test, ranks)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_texts_reach_no_terminal(tmp_path, hostile):
    async def test(screen):
        texts = [await screen.shows("newest stall"), await screen.press("h"), await screen.press("h", "enter")]
        texts += [await screen.press("q", "down", "enter")]
        assert "ledger" in texts[-1]
        assert "[bold]" in texts[-1] or "[" not in hostile[:1]  # texts are no markup
        assert all(line.isprintable() for text in texts for line in text.split("\n"))

    with_screen(test, hostile_run(tmp_path / "run", hostile, time.time()))


@pytest.mark.parametrize("size", [(20, 5), (1, 1), (80, 2), (200, 60)])
def test_any_size_of_the_terminal_will_do(ranks, size):
    pytest.importorskip("textual")
    from telemetry.top.app import TopApp

    async def shown():
        app = TopApp(ranks.path)
        async with app.run_test(size=size) as pilot:
            while not app.shown:
                await pilot.pause(0.02)
            await pilot.press("down", "enter", "h", "q", "q")
        return app.return_code

    assert asyncio.run(shown()) == 0
    join()
