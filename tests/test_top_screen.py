"""The screen of `telemetry top`: what stands on it, and what each key does. Textual's pilot stands in for a terminal."""

from __future__ import annotations

import asyncio
import queue
from dataclasses import replace

import msgspec
import pytest
from top_screens import ADVICE, FRAME, NOW, text_of

from telemetry.diagnosis.verdict import BAD
from telemetry.log_lines import GpuLine, RunStartLine, TotalsLine
from telemetry.records import Advice, StallRecord
from telemetry.report.process_log import ProcessLog
from telemetry.top.text import BAD_STYLE, HELP, LIST, RANK
from telemetry.top.view import Choice, Headline, JobView, RankRow, State
from telemetry.util.text import rough_duration

STALL = StallRecord(rank=3, cause="gc_pause", opened="2027-01-15T07:59:00.000Z", advice=[Advice(**ADVICE)])


LEDGER = {"data_wait": 1.0, "compute": 3.0}


def row(
    rank=0, state="ok", finding="", node="n1", ledger=LEDGER, recent_ledger=LEDGER, wait_ratio=None, steps=None,
    samples=None, tokens=None, **more,
) -> RankRow:  # fmt: skip
    """A rank; ``steps``, ``samples`` and ``tokens`` of a second."""
    exposed = None if wait_ratio is None else wait_ratio * sum(LEDGER.values())
    return RankRow(
        ProcessLog(rank, 10 + rank, RunStartLine(node=node)),
        totals=TotalsLine(ledger_total_seconds=ledger),
        recent=TotalsLine(
            wall_seconds=1.0, ledger_total_seconds=LEDGER, exposed_wait_total_seconds=exposed, samples_total=samples,
            tokens_total=tokens,
        ),
        live=TotalsLine(wall_seconds=1.0, ledger_total_seconds=recent_ledger, steps_total=steps),
        state=State(state),
        finding=finding or state,
        **more,
    )  # fmt: skip


def view(*rows, text="Healthy: all is well.", **more) -> JobView:
    return JobView(Headline(text, BAD), run="r", rows=rows, running=True, seen=NOW, nodes=1, **more)


def frame(shown, choice=None, width=80, height=24):
    """The lines of the list."""
    return FRAME.page(LIST, shown, choice or Choice(), width=width, height=height, now=NOW)


RANKS = (row(0), row(1, wait_ratio=0.1), row(2, "gone", "gone for 3 min", node="n2"),
         row(3, "stalled", "gc_pause", wait_ratio=0.5, stalls=(STALL,)),
         row(4, "waiting", "waits for rank 3", node="n2"), row(5, "finished"))  # fmt: skip


def pages(shown, choice, width=80, height=24):
    """The lines of each page."""
    return [FRAME.page(kind, shown, choice, width=width, height=height, now=NOW) for kind in (LIST, RANK, HELP)]


# -- lines -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (20, 5), (200, 60), (1, 1), (80, 2)])
def test_a_frame_never_exceeds_the_terminal(size):
    width, height = size
    text = "Starved: rank 3 " + "waits for data " * 30 + "/a/very/long/path" * 20 + "\u5bbd" * 200
    for lines in pages(view(*RANKS, text=text, notes=("x" * 300,)), Choice(selected=RANKS[3].key), width, height):
        assert len(lines) == height
        assert max(len("".join(text for text, _ in line)) for line in lines) <= max(width, 1)


def test_the_first_line_is_the_verdict_and_the_worst_is_on_top():
    lines = text_of(frame(view(*RANKS))).splitlines()
    assert lines[0] == "Healthy: all is well."
    places = [
        next(at for at, line in enumerate(lines) if line[1:6].strip() == str(rank)) for rank in (2, 3, 4, 1, 0, 5)
    ]
    assert places == sorted(places)
    assert "newest stall: rank 3: gc_pause, open for 60 s" in "\n".join(lines)
    assert "try num_workers=8: use more workers, predicted 1.9 times" in "\n".join(lines)


def test_bars_without_colours_are_letters_in_proportion():
    text = text_of(frame(view(row(0, recent_ledger={"data_wait": 30.0, "compute": 60.0, "checkpoint": 10.0}))))
    bar = next(line for line in text.splitlines() if "www" in line).split()[-1]
    for sign, share in (("w", 0.3), ("#", 0.6), ("c", 0.1)):
        assert bar.count(sign) / len(bar) == pytest.approx(share, abs=0.03)


def test_columns_for_the_gpu_appear_with_figures():
    assert " gpu " not in text_of(frame(view(row(0))))
    gpu = GpuLine(utilization_ratio=0.42, memory_used_bytes=3.0, memory_total_bytes=4.0, power_watts=400.0)
    text = text_of(frame(view(row(0, gpu=gpu))))
    assert " 42%  75% " in text
    assert " 400 " in text_of(frame(view(row(0, gpu=gpu)), width=120))


@pytest.mark.parametrize("hostile", ["\x1b[2J\x1b]0;title\x07", "a\nb\rc", "\u202egnp.exe", "\udcff\u2028x", "\x9b31m"])
def test_hostile_texts_reach_no_terminal(hostile):
    advice = Advice(**ADVICE | {"action": hostile, "because": hostile})
    evidence = {"stacks": [hostile], "line_verdict": hostile}
    stall = msgspec.structs.replace(STALL, cause=hostile, advice=[advice], evidence=evidence)
    bad = row(0, "stalled", hostile, node=hostile, where=hostile, now_in="compute", stalls=(stall,),
              gpu=GpuLine(name=hostile, utilization_ratio=0.5))  # fmt: skip
    shown = replace(view(bad, text=hostile, notes=(hostile,)), run=hostile)
    for lines in pages(shown, Choice(selected=bad.key, text="")):
        for text in text_of(lines).split("\n"):
            assert text.isascii()
            assert text.isprintable()


def test_old_data_is_no_alarm_before_the_next_look_is_overdue():
    shown = replace(view(row(0)), seen=NOW - 40, overdue=NOW + 5)
    for late, why, style in (
        (shown, "a look takes long", "dim"),
        (replace(shown, overdue=0.0), "RUN does not answer", BAD_STYLE),
    ):
        line = next(line for line in frame(late) if f"what is shown is {rough_duration(40)} old" in text_of([line]))
        assert why in text_of([line])
        assert line[0][1] == style


# -- orders ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sort", "values", "order"),
    [
        ("rank", [{}, {}, {}], [0, 1, 2]),
        ("slowest first", [{"steps": 3}, {"steps": 1}, {}], [1, 0, 2]),
        ("wait", [{"wait_ratio": 0.1}, {}, {"wait_ratio": 0.4}], [2, 0, 1]),
        ("GPU, idle first", [{}, {"gpu": GpuLine(utilization_ratio=0.9)}, {"gpu": GpuLine(utilization_ratio=0.2)}], [2, 1, 0]),
    ],
)  # fmt: skip
def test_orders(sort, values, order):
    rows = [row(rank, **fields) for rank, fields in enumerate(values)]
    assert [row.rank for row in Choice(sort).rows(view(*rows))] == order


# -- keys --------------------------------------------------------------------------------------------------------------


class Source:
    """Gives one view."""

    pause_seconds = 0.01

    def __init__(self, shown):
        self.shown = shown

    def poll(self):
        return self.shown


class Snapshots:
    """Notes what is requested."""

    def __init__(self):
        self.requested, self.said = [], ""

    def begin(self, rank):
        self.requested.append(rank)
        return f"requested {rank}"

    def close(self):
        self.requested.append("closed")


class Screen:
    """The app under a pilot. ``press`` returns what stands on the screen after some keys."""

    def __init__(self, app, pilot, source, snapshots):
        self.app, self.pilot, self.source, self.snapshots = app, pilot, source, snapshots

    async def press(self, *keys):
        await self.pilot.press(*keys)
        await self.pilot.pause()
        return self.text()

    async def shows(self, text):
        """The screen, once a text stands on it."""
        for _ in range(200):
            if text in self.text():
                return self.text()
            await self.pilot.pause(0.02)
        raise AssertionError(f"{text!r} did not appear:\n{self.text()}")

    def text(self):
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)


def with_screen(test, *rows, size=(80, 24), **more):
    """Run a test with an app that shows these ranks; returns the app's exit status."""
    pytest.importorskip("textual")
    from telemetry.top.app import Reader, TopApp

    async def run():
        source, requests = Source(replace(view(*rows, **more), seen=NOW)), Snapshots()
        reader = Reader(source, "Reading")
        app = TopApp(reader, FRAME, requests)
        async with app.run_test(size=size) as pilot:
            screen = Screen(app, pilot, source, requests)
            await screen.shows("worst first")
            await screen.shows("Healthy" if rows else "no rank")
            await test(screen)
        app.draw()  # as the timer may, once more, when the screen has gone
        reader.join(60)
        return app, requests

    app, requests = asyncio.run(run())
    return app.return_code, requests


def test_a_rank_shows_where_its_compute_goes():
    parts = {"forward": 0.9, "backward": 1.5, "optimizer": 0.3, "compile": 0.0, "other": 0.3}
    shown = replace(row(1), totals=TotalsLine(ledger_total_seconds=LEDGER, compute_total_seconds=parts))
    text = text_of(FRAME.rank_lines(shown, 80, NOW))
    assert "compute: forward 30 %, backward 50 %, optimizer 10 %, other 10 %" in text
    assert "compute:" not in text_of(FRAME.rank_lines(row(1), 80, NOW))


def test_keys_open_a_rank_and_go_back():
    async def test(screen):
        assert "> " in await screen.press("down")
        assert "rank 3 on n1, pid 13: gc_pause" in await screen.press("enter")
        for back in ("q", "escape", "left", "backspace", "enter"):
            assert "newest stall" in await screen.press(back)
            assert "rank 3 on n1, pid 13" in await screen.press("right")
        assert "rank 3 on n1, pid 13" not in await screen.press("down", "down", "end")
        assert "rank 3 on n1, pid 13" in await screen.press("up", "up")
        assert "open the rank under the cursor" in await screen.press("q", "h")
        assert "newest stall" in await screen.press("question_mark")
        await screen.press("q")

    assert with_screen(test, *RANKS, size=(80, 14))[0] == 0


def test_the_cursor_stays_on_its_rank_when_the_order_changes():
    async def test(screen):
        assert "\n>   3 n1" in await screen.press("down")
        changed = tuple(replace(r, state=State.OK, finding="was 3") if r.rank == 3 else r for r in RANKS)
        screen.source.shown = replace(screen.source.shown, rows=changed)
        assert "\n>   3 n1       was 3" in await screen.shows("was 3")
        assert "\n>   2 n2" in await screen.press("home")

    with_screen(test, *RANKS)


def test_keys_move_through_a_thousand_ranks():
    async def test(screen):
        assert "\n> 995 n1" in screen.text()
        assert "of 1000" in screen.text()
        assert "\n>   5 n1" in await screen.press("G")
        assert "\n> 995 n1" in await screen.press("g")
        first = await screen.press("space", "j", "j", "k")
        assert first != await screen.press("pageup")

    with_screen(test, *(row(rank, wait_ratio=rank / 1000) for rank in range(1000)))


def test_a_snapshot_is_asked_for_before():
    async def test(screen):
        for key in ("q", "enter", "escape", "n"):
            assert "Request a snapshot? y: of rank 2" in await screen.press("n")
            assert "no snapshot was requested" in await screen.press(key)
            assert screen.snapshots.requested == []
        assert "requested 2" in await screen.press("n", "y")
        assert "requested all" in await screen.press("n", "a")
        screen.snapshots.said = "snapshot: rank 2 has answered"
        await screen.shows("rank 2 has answered")
        assert "rank 2 has answered" not in await screen.press("t")

    assert with_screen(test, *RANKS)[1].requested == ["2", "all", "closed"]


def test_without_a_rank_there_is_no_snapshot():
    async def test(screen):
        assert "there is no rank to take a snapshot of" in await screen.press("n")

    with_screen(test, text="no rank")


def test_typing_a_text_to_find():
    async def test(screen):
        assert "find: n2_" in await screen.press("slash", "n", "2", "x", "backspace")
        text = await screen.press("enter")
        assert "gone for 3 min" in text
        assert "gc_pause  " not in text
        assert "find n2" in text
        assert "gc_pause  " in await screen.press("escape")
        assert "no rank is like that" in await screen.press("slash", "q", "z")
        assert "gc_pause  " in await screen.press("escape")

    with_screen(test, *RANKS, size=(110, 24))


def test_only_ranks_in_trouble_other_orders_and_other_bars():
    async def test(screen):
        assert "ccc" not in screen.text()
        assert "ccc" in await screen.press("t")
        text = await screen.press("t", "f")
        assert "trouble only" in text
        assert "waits for rank 3" not in text
        assert "waits for rank 3" in await screen.press("f")
        assert "quit  rank\n" in await screen.press("s") + "\n"
        assert "quit  memory" in await screen.press("S", "S")

    saving = row(6, ledger={"checkpoint": 1.0})
    with_screen(test, *RANKS, saving, size=(110, 24))


# -- the reader --------------------------------------------------------------------------------------------------------


class Told:
    """Gives what it is told to; ``asked`` has an entry for each look."""

    pause_seconds = 0.0

    def __init__(self):
        self.answers, self.asked = queue.Queue(), queue.Queue()

    def poll(self):
        self.asked.put(1)
        answer = self.answers.get(timeout=60)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_failed_look_is_a_note_on_the_old_view_until_the_next():
    pytest.importorskip("textual")
    from telemetry.top.app import Reader

    source, seen = Told(), replace(view(row(0), notes=("of the job",)))
    reader = Reader(source, "Reading")
    reader.start()
    bad = "cannot be read: ValueError: bad line"
    source.asked.get(timeout=60)
    for answer, rows, notes in (
        (ValueError("bad line"), (), (bad,)),
        (seen, seen.rows, ("of the job",)),
        (ValueError("bad line"), seen.rows, (bad, "of the job")),
        (seen, seen.rows, ("of the job",)),
    ):
        source.answers.put(answer)
        source.asked.get(timeout=60)  # the last answer is taken
        assert (reader.view.rows, reader.view.notes) == (rows, notes)
    reader.closed.set()
    source.answers.put(seen)
    reader.join(60)
