"""Which line a fetch or a step spends its time in: the profile, the line that is named, and what a faster one would bring."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

import telemetry
from telemetry.agent.lines import MAX_BYTES, MAX_FILES, write_profile
from telemetry.diagnosis.evidence import Evidence
from telemetry.diagnosis.lines import MIN_SAMPLES, LineShare, line_advice, line_shares, line_verdict
from telemetry.hooks.worker_block import SharedArea
from telemetry.report.logs import load
from telemetry.util.profiles import CHECKPOINT, FETCH, MAX_STACKS, SAMPLER, STEP, WAIT, StackProfile
from telemetry.util.stacks import Spot, is_library
from tests.report_logs import START, line, summarize, text_of, totals, window, write
from tests.slice_cases import CASES, a_slice, with_workers
from tests.slices import evidence_over

# -- which line a fetch or a step spends its time in: the profile, the line that is named, and what the report shows ---


FETCHER = Spot("/lib/site-packages/torch/utils/data/_utils/fetch.py", 54, "fetch", "torch.utils.data._utils.fetch")
COLLATE = Spot(
    "/lib/site-packages/torch/utils/data/_utils/collate.py", 20, "default_collate", "torch.utils.data._utils.collate"
)
ITEM = Spot("/home/me/train.py", 42, "__getitem__", "__main__")
RESIZE = Spot("/lib/site-packages/PIL/Image.py", 9, "resize", "PIL.Image")
CALL = Spot("/lib/site-packages/torchvision/transforms.py", 3, "_call_impl", "torchvision.transforms")
LOOP = Spot("/home/me/train.py", 7, "main", "__main__")
DRAWING = Spot("/lib/site-packages/torch/utils/data/dataloader.py", 700, "_next_index", "torch.utils.data.dataloader")
QUEUE = Spot("/usr/lib/python3/queue.py", 1, "get", "queue")
FOLDER = Spot("/lib/site-packages/torchvision/datasets/folder.py", 245, "__getitem__", "torchvision.datasets.folder")


def profile_of(*stacks: tuple[tuple[Spot, ...], int]) -> StackProfile:
    profile = StackProfile()
    for stack, share in stacks:
        for _ in range(share):
            profile.add(stack, 1_000_000, 500_000)
    return profile


# -- the profile -------------------------------------------------------------------------------------------------


def test_a_packed_profile_is_the_same_when_it_is_unpacked():
    profile = profile_of(((RESIZE, ITEM, FETCHER), 30), ((ITEM, FETCHER), 70))
    profile.times[ITEM, FETCHER] = profile.times[ITEM, FETCHER]._replace(gil_ns=7_000_000)
    back = StackProfile.unpacked(profile.packed(SharedArea.HALF_BYTES))
    assert (back.times, back.samples) == (profile.times, 100)


def test_a_path_is_written_once():
    path = f"/scratch/{'experiment-with-a-long-name/' * 30}train.py"
    stacks = [((Spot(path, n, "item", "__main__"), FETCHER), 1) for n in range(100)]
    packed = profile_of(*stacks).packed(SharedArea.HALF_BYTES)
    assert {stack[0].file for stack in StackProfile.unpacked(packed).times} == {path}
    assert packed.count(path.encode()) == 1


def test_a_profile_that_does_not_fit_keeps_its_longest_stacks():
    few = [((Spot("/a.py", n, "f" * 50, "m"), FETCHER), 1) for n in range(400)]
    profile = profile_of(((ITEM, FETCHER), 50), *few)
    packed = profile.packed(4000)
    back = StackProfile.unpacked(packed)
    assert len(packed) <= 4000
    assert (ITEM, FETCHER) in back.times
    assert back.wall_ns == profile.wall_ns
    assert len(back.times) < 401


def test_a_profile_has_a_limited_number_of_stacks():
    profile = profile_of(*(((Spot("/a.py", n, "f", "m"),), 1) for n in range(MAX_STACKS + 100)))
    assert len(profile.times) == MAX_STACKS + 1, "the others are summed up"
    assert profile.wall_ns == StackProfile.unpacked(profile.packed(1 << 20)).wall_ns == (MAX_STACKS + 100) * 1_000_000


def test_names_that_would_break_the_format_are_kept_apart():
    odd = Spot("/a;b\t\nc.py", 1, "f;g", "m")
    profile = profile_of(((odd,), 50))
    ((stack, _),) = StackProfile.unpacked(profile.packed(SharedArea.HALF_BYTES)).times.items()
    assert len(stack) == 1
    (text,) = profile.folded("root", MAX_BYTES).decode().splitlines()
    assert text.count(";") == 1
    assert text.endswith(" 50000")


@pytest.mark.parametrize("content", [b"", b"1 2", b"[1,2]", b"\xff\xfe", b'[1,["f"],[[0,1,"f","m"]],[[[1,1],[7]]]]'])
def test_a_damaged_profile_is_refused(content):
    with pytest.raises(ValueError, match=r"."):
        StackProfile.unpacked(content)


# -- which line --------------------------------------------------------------------------------------------------


def test_the_users_innermost_line_and_the_function_that_it_called():
    helper = Spot("/home/me/helpers.py", 5, "shrink", "helpers")
    first, second = line_shares(profile_of(((RESIZE, helper, ITEM, FETCHER), 75), ((ITEM, FETCHER), 25)), FETCH)
    assert (first.place, first.function, first.calls, first.share) == ("helpers.py:5", "shrink", "Image.resize", 0.75)
    assert (second.place, second.calls, second.share) == ("train.py:42", None, 0.25)


def test_how_much_of_its_time_a_line_and_the_rest_hold_the_gil():
    profile = profile_of(((RESIZE, ITEM, FETCHER), 60), ((ITEM, FETCHER), 30), ((COLLATE, FETCHER), 10))
    for stack, gil_ns in (((RESIZE, ITEM, FETCHER), 15_000_000), ((ITEM, FETCHER), 30_000_000)):
        profile.times[stack] = profile.times[stack]._replace(gil_ns=gil_ns)
    first = line_shares(profile, FETCH)[0]
    assert (first.share, first.gil_ratio, first.rest_gil_ratio) == (0.6, 0.25, 0.75)


def test_a_call_that_is_only_passed_on_is_not_the_one_that_is_named():
    (found,) = line_shares(profile_of(((RESIZE, CALL, CALL, ITEM, FETCHER), 50)), FETCH)
    assert found.calls == "Image.resize"


def test_a_comprehension_is_part_of_its_function():
    inner = ITEM._replace(function="<genexpr>")
    (found,) = line_shares(profile_of(((inner, ITEM, FETCHER), 60), ((ITEM, FETCHER), 40)), FETCH)
    assert (found.function, found.share) == ("__getitem__", 1.0)


def test_a_batch_that_libraries_make_alone_has_the_librarys_line():
    profile = profile_of(((RESIZE, FOLDER, FETCHER, LOOP), 60), ((COLLATE, FETCHER, LOOP), 40))
    first, second = line_shares(profile, FETCH)
    assert (first.place, first.calls) == ("folder.py:245", "Image.resize")
    assert (second.place, second.calls) == ("fetch.py:54", "collate.default_collate")


def test_a_share_is_as_sure_as_it_has_samples():
    """A line of which all samples are is not all of the work, and time without a sample makes no share surer."""
    for samples, error in ((100, 0.043), (400, 0.022)):
        profile = profile_of(((ITEM, FETCHER), samples // 4), ((RESIZE, ITEM, FETCHER), 3 * samples // 4))
        profile.add((ITEM, FETCHER), 0, 0, samples=0)
        assert [found.error for found in line_shares(profile, FETCH)] == [pytest.approx(error, abs=5e-4)] * 2
    (found,) = line_shares(profile_of(((ITEM, FETCHER), 60)), FETCH)
    assert (found.share, found.error) == (1.0, pytest.approx(1.5 / 60))


def test_of_a_wait_for_workers_only_samples_in_the_sampler_make_it_sure():
    profile = profile_of(((ITEM, DRAWING, LOOP), 25), ((RESIZE, ITEM, DRAWING, LOOP), 75), ((QUEUE, LOOP), 300))
    assert [found.error for found in line_shares(profile, SAMPLER)] == [pytest.approx(0.043, abs=5e-4)] * 2


def test_few_samples_name_no_line():
    half = MIN_SAMPLES // 2
    assert line_shares(profile_of(((ITEM, FETCHER), half), ((RESIZE, ITEM, FETCHER), half - 1)), FETCH) == ()
    assert line_shares(profile_of(((ITEM, FETCHER), half - 1)), FETCH) == ()
    assert [found.share for found in line_shares(profile_of(((ITEM, FETCHER), half)), FETCH)] == [1.0], "it is sure"
    profile = profile_of(((ITEM, DRAWING, LOOP), 9), ((QUEUE, LOOP), 300))
    assert line_shares(profile, SAMPLER) == ()


def test_of_a_wait_for_workers_only_the_sampler_counts():
    profile = profile_of(((ITEM, DRAWING, LOOP), 60), ((QUEUE, LOOP), 70))
    (found,) = line_shares(profile, SAMPLER)
    assert (found.place, found.share) == ("train.py:42", 1.0)


# -- what is written ---------------------------------------------------------------------------------------------


def test_the_folder_keeps_the_newest_profiles_of_a_rank(tmp_path):
    folder = tmp_path / "profiles"
    for number in range(MAX_FILES + 3):
        write_profile(folder, f"rank-0.5.stall-{number}.workers_cpu_bound.folded", b"a;b 1\n" * 100_000)
        os.utime(tmp_path / "profiles" / f"rank-0.5.stall-{number}.workers_cpu_bound.folded", (number, number))
    write_profile(folder, "rank-1.5.stall-0.unknown.folded", b"a 1\n")
    names = {path.name for path in (tmp_path / "profiles").iterdir()}
    assert len(names) == MAX_FILES + 1
    assert "rank-1.5.stall-0.unknown.folded" in names
    assert f"rank-0.5.stall-{MAX_FILES + 2}.workers_cpu_bound.folded" in names
    assert "rank-0.5.stall-0.workers_cpu_bound.folded" not in names
    assert all(path.stat().st_size <= MAX_BYTES for path in (tmp_path / "profiles").iterdir())


def a_stalled_run(tmp_path, source, **event):
    code = {"file": str(source), "line": 2, "function": "load", "calls": "Image.resize", "share_ratio": 0.61}
    alone = {"file": "/gone/train.py", "line": 9, "function": "load", "share_ratio": 0.2}
    said = "61 % of each fetch is Image.resize at data.py:2"
    evidence = {"lines": [code, alone], "lines_of": "fetch", "line_verdict": said, "lost_seconds": {}}
    opened = line("stall_open", cause="workers_cpu_bound", opened="2026-01-01T00:00:05.000Z", evidence={"a": 1})
    told = line("stall_lines", cause="workers_cpu_bound", evidence=evidence)
    write(
        tmp_path, 0, line("run_start", **START), window(seconds=[0.1] * 9, wait=8, compute=2, steps=9), opened, told,
        line("run_end", **totals(wait=8, compute=2, steps=9)),
    )  # fmt: skip
    return load(tmp_path)


def test_the_report_of_an_open_stall_has_its_lines(tmp_path):
    source = tmp_path / "data.py"
    source.write_text("def load():\n    image = image.resize((8, 8))\n")
    os.utime(source, (1_000_000, 1_000_000))
    processes = a_stalled_run(tmp_path, source)
    summary = summarize(processes)
    (stall,) = summary["stalls"]
    assert stall["closed"] is None
    first, second = stall["evidence"]["lines"]
    assert set(first) == set(second) == {"file", "line", "function", "calls", "share_ratio"}
    assert second["calls"] is None
    assert "Cause: workers_cpu_bound. 61 % of each fetch is Image.resize at data.py:2." in summary["verdict"]
    text = text_of(processes)
    (row,) = [shown for shown in text.splitlines() if "data.py:2 " in shown]
    assert row.split() == ["61.0", "%", "data.py:2", "load", "Image.resize", "image", "=", "image.resize((8,", "8))"]


def test_the_text_of_a_file_that_has_changed_is_not_shown(tmp_path):
    source = tmp_path / "data.py"
    source.write_text("def load():\n    something_else()\n")
    os.utime(source, (4_000_000_000, 4_000_000_000))
    assert "something_else" not in text_of(a_stalled_run(tmp_path, source))


def test_the_report_of_a_healthy_run_has_the_lines_of_its_steps(tmp_path):
    found = [
        {"file": "/gone/train.py", "line": 28, "function": "main", "calls": "Tensor.backward", "share_ratio": 0.46},
        {"file": "/gone/train.py", "line": 26, "function": "main", "calls": "Linear.forward", "share_ratio": 0.31},
        {"file": "/gone/train.py", "line": 29, "function": "main", "calls": None, "share_ratio": 0.08},
    ]
    write(
        tmp_path, 0, line("run_start", **START), window(seconds=[0.1] * 9, wait=0.1, compute=9, steps=90),
        line("step_lines", lines=found[:1], samples=40), line("step_lines", lines=found, samples=80),
        line("run_end", **totals(wait=0.1, compute=9, steps=90)),
    )  # fmt: skip
    processes = load(tmp_path)
    summary = summarize(processes)
    assert summary["ranks"][0]["step_lines"] == found
    said = "Its steps spend 46 % in Tensor.backward at train.py:28 and 31 % in Linear.forward at train.py:26."
    assert summary["verdict"].startswith("Healthy: ")
    assert summary["verdict"].endswith(said)
    assert "train.py:29" in text_of(processes)


# -- what a line is predicted to cost: the two what-ifs, and the sentence of the verdict -------------------------------


def a_line(share: float, cpu_share: float | None = None, error: float = 0.0) -> LineShare:
    cpu_share = share if cpu_share is None else cpu_share
    return LineShare("/home/me/train.py", 42, "load", "Image.resize", share, cpu_share, error)


ONE_WORKER = evidence_over(
    [with_workers(busy=1.0, cpu=1.0, workers=1, fetches=10, steps=10, wait=0.6, compute=0.4, cores=8.0)]
)
"""Ten fetches of 100 ms in a second, with 40 ms of compute each."""


def test_the_what_ifs_of_a_fetch():
    removed, halved = line_advice(ONE_WORKER, FETCH, a_line(0.5), cause="workers_cpu_bound")
    assert "Image.resize at train.py:42" in removed.action
    assert removed.predicted_speedup == pytest.approx(2.0)  # 50 ms a fetch, 40 ms of compute
    assert halved.predicted_speedup == pytest.approx(1.33)
    assert removed.because == "50 % of each fetch is this line: 50.0 ms of 100.0 ms"
    removed, _ = line_advice(ONE_WORKER, FETCH, a_line(0.9), cause="workers_cpu_bound")
    assert removed.predicted_speedup == pytest.approx(2.5), "a fetch cannot become faster than the compute"


def test_a_line_that_waits_leaves_the_cpu_time_to_the_cores():
    """On one core, with 100 ms of CPU time for compute and fetch, a line that only waits cannot help further."""
    part = with_workers(
        busy=1.0,
        cpu=0.6,
        blocked=0.4,
        workers=1,
        fetches=10,
        steps=10,
        wait=0.6,
        compute=0.4,
        process_cpu=0.4,
        cores=1.0,
    )
    waits, computes = (a_line(0.4, 0.0), a_line(0.4, 0.66))
    evidence = evidence_over([part])
    advice = [line_advice(evidence, FETCH, each, cause="workers_io_bound") for each in (waits, computes)]
    assert advice[0] == ()  # 60 ms of fetch and 40 ms of compute still take the core for 100 ms
    assert advice[1][0].predicted_speedup > 1.5


def test_the_verdict_says_what_remains():
    assert line_verdict(ONE_WORKER, FETCH, a_line(0.61), cause="workers_cpu_bound") == (
        "61 % of each fetch is Image.resize at train.py:42; without it a fetch takes 39.0 ms, predicted 2.5 times the "
        "steps per second"
    )
    own = dataclasses.replace(a_line(0.3), calls=None)
    said = line_verdict(ONE_WORKER, FETCH, own, cause="workers_cpu_bound")
    assert said.startswith("30 % of each fetch is load at"), "it called no library"


def test_few_samples_predict_a_range():
    """In a step of 100 ms, 80 % may be 70 to 90 % as well."""
    line, evidence = a_line(0.8, error=0.05), evidence_over([CASES["gc_pause"]])
    removed, halved = line_advice(evidence, STEP, line, cause="gc_pause")
    low, high = (line_advice(evidence, STEP, a_line(share), cause="gc_pause")[0] for share in (0.7, 0.9))
    assert (removed.predicted_low, removed.predicted_speedup) == (low.predicted_speedup, high.predicted_speedup)
    assert (halved.predicted_low, halved.predicted_speedup) == (None, pytest.approx(1.67, abs=0.01))
    text = f"predicted {low.predicted_speedup:g} to {high.predicted_speedup:g} times the steps per second"
    assert line_verdict(evidence, STEP, line, cause="gc_pause").endswith(text)


def test_a_line_of_which_all_samples_are_has_its_what_ifs():
    """It takes at least 95 % of a step."""
    evidence, line = evidence_over([CASES["gc_pause"]]), a_line(1.0, error=0.025)
    removed, halved = line_advice(evidence, STEP, line, cause="gc_pause")
    assert (removed.predicted_low, removed.predicted_speedup) == (pytest.approx(20.0), pytest.approx(40.0))
    assert halved.predicted_speedup == pytest.approx(1.95, abs=0.01)


def fetches(number: int) -> Evidence:
    """So many in a second, on the CPU, of one worker."""
    in_all = dict(fetches=number, steps=number, wait=0.95, compute=0.05, cores=8.0, process_cpu=0.05)
    return evidence_over([with_workers(busy=1.0, cpu=1.0, workers=1, **in_all)])


SHORT_FETCHES = fetches(20)


def held(share: float, gil_ratio: float, rest_gil_ratio: float, error: float = 0.0) -> LineShare:
    """A line of fetches that hold the GIL for these parts of the time: in the line, and in the rest."""
    return dataclasses.replace(a_line(share, error=error), gil_ratio=gil_ratio, rest_gil_ratio=rest_gil_ratio)


def test_python_code_that_remains_takes_turns_with_the_sending_of_batches():
    """Without the line a fetch takes 10 ms, or 15. With half of it, sending still has time of its own."""
    line = held(0.8, 0.0, 1.0)
    removed, _ = line_advice(SHORT_FETCHES, FETCH, line, cause="workers_cpu_bound")
    assert (removed.predicted_low, removed.predicted_speedup) == (pytest.approx(50 / 15, abs=0.01), pytest.approx(5.0))
    _, halved = line_advice(fetches(50), FETCH, line, cause="workers_cpu_bound")
    assert (halved.predicted_low, halved.predicted_speedup) == (None, pytest.approx(1 / 0.6, abs=0.01))


@pytest.mark.parametrize(
    "line",
    [held(0.8, 1.0, 1.0), held(0.8, 0.0, 0.0), held(0.4, 0.0, 1.0)],
    ids=["they take turns already", "what remains releases it", "much remains"],
)
def test_else_sending_makes_no_range(line):
    removed, _ = line_advice(SHORT_FETCHES, FETCH, line, cause="workers_cpu_bound")
    assert removed.predicted_low is None
    assert removed.predicted_speedup == pytest.approx(1 / (1 - line.share), abs=0.01)


def test_few_samples_and_the_sending_of_batches_make_one_range():
    line = held(0.8, 0.0, 1.0, error=0.05)
    removed, _ = line_advice(SHORT_FETCHES, FETCH, line, cause="workers_cpu_bound")
    assert (removed.predicted_low, removed.predicted_speedup) == (pytest.approx(50 / 20, abs=0.01), pytest.approx(10.0))


def test_the_what_ifs_of_the_training_threads_own_fetch():
    evidence = evidence_over([a_slice(source="training_thread", wait=0.6, compute=0.4)])
    removed, halved = line_advice(evidence, WAIT, a_line(0.5), cause="loader_on_training_thread")
    assert removed.predicted_speedup == pytest.approx(1 / 0.7, abs=0.01)
    assert halved.predicted_speedup == pytest.approx(1 / 0.85, abs=0.01)


def test_the_what_ifs_of_a_checkpoint():
    evidence = evidence_over([CASES["checkpoint"]])
    removed, _ = line_advice(evidence, CHECKPOINT, a_line(1.0), cause="checkpoint")
    whole = evidence.loop_and_checkpoint_seconds
    assert removed.predicted_speedup == pytest.approx(whole / (whole - evidence.checkpoints.seconds), abs=0.01)


@pytest.mark.parametrize(("cause", "part"), CASES.items(), ids=[*CASES])
def test_no_line_is_predicted_to_slow_a_run_down(cause, part):
    evidence = evidence_over([part])
    for kind in (FETCH, WAIT, SAMPLER, STEP, CHECKPOINT):
        for share in (0.05, 0.5, 1.0):
            advice = line_advice(evidence, kind, a_line(share), cause=cause.split(",")[0])
            assert all(each.predicted_speedup >= 1 for each in advice)
            assert line_verdict(evidence, kind, a_line(share), cause=cause.split(",")[0])


def test_ranks_that_wait_have_the_lines_of_the_slow_one(tmp_path):
    code = {"file": "/home/me/train.py", "line": 7, "function": "main", "calls": None, "share_ratio": 0.8}
    said = {"lines": [code], "lines_of": "step", "line_verdict": "80 % of each step of rank 1 is main at train.py:7"}
    run = window(seconds=[0.1] * 9, wait=1, compute=9, steps=9)
    opened = {"opened": "2026-01-01T00:00:05.000Z", "cause": "straggler", "evidence": {"straggler_rank": 1}}
    write(tmp_path, 0, line("run_start", **START), run, line("stall_open", **opened))
    of_slow = line("straggler_lines", 1, evidence=said)
    end = line("run_end", 1, **totals(wait=0, compute=10, steps=9))
    write(tmp_path, 1, line("run_start", 1, **START), of_slow, end)
    (stall,) = summarize(load(tmp_path))["stalls"]
    assert stall["rank"] == 0
    assert stall["evidence"]["lines"] == [code]


# -- which frames of a stack are the user's own code -------------------------------------------------------------------


PACKAGE = Path(telemetry.__file__).parent


def test_a_script_is_the_user_s_and_no_file_of_the_package():
    assert [path for path in PACKAGE.rglob("*.py") if not is_library(str(path))] == []
    assert not any(map(is_library, [f"{PACKAGE}-runs/train.py", "/home/me/train.py", "train.py"]))
