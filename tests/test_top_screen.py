"""The screen of `telemetry top`, without a terminal: frames, orders, keys, hostile texts."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from top_screens import ADVICE, ASCII, NOW, text_of

from telemetry.top.job_view import JobView, waiting
from telemetry.top.live_verdict import BAD, Verdict
from telemetry.top.rank_order import SORTS, arranged
from telemetry.top.rank_row import RankRow
from telemetry.top.screen import Frame
from telemetry.top.screen_state import CONFIRM, HELP, LIST, RANK, TYPING, ScreenState, press, shown_rows
from telemetry.top.terminal_keys import KeyDecoder
from telemetry.util.text import rough_duration

STALL = {"rank": 3, "cause": "gc_pause", "opened": "2027-01-15T07:59:00.000Z", "closed": None, "evidence": {},
         "advice": [ADVICE]}  # fmt: skip


def row(rank=0, state="ok", finding="", **more) -> RankRow:
    ledger = {"data_wait": 1.0, "compute": 3.0}
    fields = {"node": "n1", "pid": 10 + rank, "since": None, "recent_ledger": ledger, "ledger": ledger} | more
    return RankRow(rank=rank, state=state, finding=finding or state, **fields)


def view(*rows, text="Healthy: all is well.", **more) -> JobView:
    return JobView(Verdict(text, BAD), run="r", rows=rows, running=True, seen=NOW, nodes=1, **more)


def frame(shown, state=ScreenState(), width=80, height=24):
    return Frame(ASCII, "RUN").lines(shown, state, width=width, height=height, now=NOW)


RANKS = (row(0), row(1, wait_ratio=0.1), row(2, "gone", "gone for 3 min", node="n2"),
         row(3, "stalled", "gc_pause", wait_ratio=0.5, stalls=(STALL,)),
         row(4, "waiting", "waits for rank 3", node="n2"), row(5, "finished"))  # fmt: skip


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (20, 5), (200, 60), (1, 1), (80, 2)])
@pytest.mark.parametrize("page", [LIST, RANK, HELP])
def test_a_frame_never_exceeds_the_terminal(size, page):
    width, height = size
    text = "Starved: rank 3 " + "waits for data " * 30 + "/a/very/long/path" * 20
    shown = view(*RANKS, text=text, notes=("x" * 300,))
    lines = frame(shown, ScreenState(page=page, selected=RANKS[3].key), width, height)
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
    assert bar.count("w") / len(bar) == pytest.approx(0.3, abs=0.03)
    assert bar.count("#") / len(bar) == pytest.approx(0.6, abs=0.03)
    assert bar.count("c") / len(bar) == pytest.approx(0.1, abs=0.03)


def test_columns_for_the_gpu_appear_with_figures():
    assert " gpu " not in text_of(frame(view(row(0))))
    figures = {"utilization_ratio": 0.42, "memory_used_bytes": 3.0, "memory_total_bytes": 4.0, "power_watts": 400.0}
    text = text_of(frame(view(row(0, figures=figures))))
    assert " 42%  75% " in text
    assert " 400 " in text_of(frame(view(row(0, figures=figures)), width=120))


@pytest.mark.parametrize("hostile", ["\x1b[2J\x1b]0;title\x07", "a\nb\rc", "\u202egnp.exe", "\udcff\u2028x", "\x9b31m"])
def test_hostile_texts_reach_no_terminal(hostile):
    stall = STALL | {"cause": hostile, "advice": [{"action": hostile, "because": hostile}],
                     "evidence": {"stacks": [hostile], "line_verdict": hostile}}  # fmt: skip
    bad = row(0, "stalled", hostile, node=hostile, where=hostile, now_in="compute", stalls=(stall,),
              figures={"name": hostile, "utilization_ratio": 0.5})  # fmt: skip
    shown = replace(view(bad, text=hostile, notes=(hostile,)), run=hostile)
    for page in (LIST, RANK, HELP):
        for text in text_of(frame(shown, ScreenState(page=page, selected=bad.key))).split("\n"):
            assert text.isascii()
            assert text.isprintable()


@pytest.mark.parametrize("sort", SORTS)
def test_every_order_has_all_ranks_once(sort):
    assert sorted(row.rank for row in arranged(RANKS, sort)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("sort", "values", "order"),
    [
        ("rank", [{}, {}, {}], [0, 1, 2]),
        ("slowest first", [{"steps_per_second": 3.0}, {"steps_per_second": 1.0}, {}], [1, 0, 2]),
        ("wait", [{"wait_ratio": 0.1}, {}, {"wait_ratio": 0.4}], [2, 0, 1]),
        ("GPU, idle first", [{}, {"figures": {"utilization_ratio": 0.9}}, {"figures": {"utilization_ratio": 0.2}}], [2, 1, 0]),
    ],
)  # fmt: skip
def test_orders(sort, values, order):
    rows = [row(rank, **fields) for rank, fields in enumerate(values)]
    assert [row.rank for row in arranged(rows, sort)] == order


def test_the_filter_and_the_text():
    assert [r.rank for r in arranged(RANKS, "rank", trouble_only=True)] == [2, 3]
    assert [r.rank for r in arranged(RANKS, "rank", text="N2")] == [2, 4]
    assert [r.rank for r in arranged(RANKS, "rank", text="rank 3")] == [3, 4]


def pressed(state, *keys, rows=RANKS, no_snapshot=""):
    for key in keys:
        result = press(state, key, shown_rows(state, rows), page_rows=10, no_snapshot=no_snapshot)
        state = result.state
    return result


def test_keys_move_open_and_go_back():
    state = pressed(ScreenState(), "down", "enter").state
    assert (state.page, state.selected) == (RANK, RANKS[3].key)
    assert "rank 3 on n1, pid 13: gc_pause" in text_of(frame(view(*RANKS), state))
    assert pressed(state, "q").state.page == LIST
    assert pressed(state, "q", "q").quit


def test_the_cursor_stays_on_its_rank():
    """The list is in another order a moment later."""
    state = pressed(ScreenState(), "down").state
    assert state.selected == RANKS[3].key
    changed = tuple(replace(r, state="ok", finding="ok") if r.rank == 3 else r for r in RANKS)
    assert pressed(state, "enter", rows=changed).state.selected == RANKS[3].key


def test_a_snapshot_is_asked_for_before():
    asked = pressed(ScreenState(), "n").state
    assert asked.mode == CONFIRM
    assert "Request a snapshot? y: of rank 2" in text_of(frame(view(*RANKS), asked))
    assert pressed(asked, "y").snapshot == "2"
    assert pressed(asked, "a").snapshot == "all"
    for key in ("q", "enter", "escape", "n"):
        assert pressed(asked, key).snapshot is None
        assert not pressed(asked, key).quit


def test_without_a_folder_a_snapshot_says_why_not():
    state = pressed(ScreenState(), "n", no_snapshot="it needs the folder").state
    assert state.mode == ""
    assert "it needs the folder" in text_of(frame(view(*RANKS), state))


def test_typing_a_text_to_find():
    state = pressed(ScreenState(), "/", "n", "2", "backspace", "2").state
    assert (state.mode, state.text) == (TYPING, "n2")
    state = pressed(state, "enter").state
    text = text_of(frame(view(*RANKS), state))
    assert "gone for 3 min" in text
    assert "finished" not in text.replace("1 finished", "")
    assert pressed(state, "escape").state.text == ""


def test_bars_over_the_whole_run():
    shown = view(row(0, recent_ledger={"compute": 1.0}, ledger={"checkpoint": 1.0}))
    assert "ccc" not in text_of(frame(shown))
    assert "ccc" in text_of(frame(shown, pressed(ScreenState(), "t").state))


def test_old_data_is_called_old():
    shown = replace(view(row(0)), seen=NOW - 40)
    assert f"what is shown is {rough_duration(40)} old" in text_of(frame(shown))


def test_old_data_is_no_alarm_before_the_next_look_is_overdue():
    shown = replace(view(row(0)), seen=NOW - 40, overdue=NOW + 5)
    line = next(line for line in frame(shown) if "40 s old" in text_of([line]))
    assert "a look takes long" in text_of([line])
    assert line[0][1] == "dim"
    late = replace(shown, overdue=NOW - 1)
    line = next(line for line in frame(late) if "40 s old" in text_of([line]))
    assert "does not answer" in text_of([line])
    assert line[0][1] == "bad"


def test_waiting_for_a_run():
    assert text_of(frame(waiting("Waiting for the run to begin.", NOW))).startswith("Waiting for the run to begin.")


def test_of_many_ranks_the_visible_are_drawn():
    rows = tuple(row(rank, wait_ratio=rank / 1000) for rank in range(1000))
    text = text_of(frame(view(*rows)))
    assert "\n> 995 n1" in text
    assert "of 1000" in text
    last = pressed(ScreenState(), "end", rows=rows).state
    assert "\n>   5 n1" in text_of(frame(view(*rows), last))


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ([b"q"], ["q"]),
        ([b"\x1b[A\x1b[B"], ["up", "down"]),
        ([b"\x1b", b"[5~"], ["page up"]),
        ([b"\x1b[", b"6~j"], ["page down", "j"]),
        ([b"\x1bOH\r\x7f"], ["home", "enter", "backspace"]),
        ([b"\x1b[1;5C\x1b[200~x"], ["x"]),
        (["\u00e9".encode()[:1], "\u00e9".encode()[1:]], ["\u00e9"]),
        ([b"\x00\x01"], []),
    ],
)
def test_keys_come_out_of_bytes(sent, keys):
    decoder = KeyDecoder()
    assert [key for part in sent for key in decoder.keys(part)] == keys


def test_an_escape_alone_is_a_key():
    decoder = KeyDecoder()
    assert decoder.keys(b"\x1b") == []
    assert decoder.rest() == ["escape"]
    assert decoder.rest() == []


def test_the_command_loads_no_torch(tmp_path):
    import subprocess

    code = ("import sys; from telemetry.cli import main; status = main(['top', '--once', sys.argv[1]]); "
            "assert 'torch' not in sys.modules; sys.exit(status)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("Waiting for the run to begin")


def test_without_rich_the_error_names_the_command(tmp_path, monkeypatch, capsys):
    from telemetry.top import command

    monkeypatch.setattr(command, "find_spec", lambda _: None)
    assert command.top(str(tmp_path), [], once=True) == 1
    assert "pip install 'torch-telemetry[top]'" in capsys.readouterr().err
