"""Which line a fetch or a step spends its time in: the profile, the line that is named, and what a faster one would bring."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import telemetry
from telemetry.agent.line_monitor import MAX_BYTES, MAX_FILES, write_profile
from telemetry.diagnosis.hot_lines import MIN_SAMPLES, LineShare, line_advice, line_shares, line_verdict, whole_line
from telemetry.log.reader import load
from telemetry.util.profiles import CHECKPOINT, FETCH, MAX_STACKS, SAMPLER, STEP, WAIT, StackProfile, StackTime
from telemetry.util.stacks import Spot, is_library
from tests.report_logs import START, line, summarize, text_of, totals, window, write
from tests.slice_cases import CASES, a_slice, with_workers
from tests.slices import evidence_over

MS = 1_000_000
SITE = "/lib/site-packages/"
FETCHER = Spot("/lib/site-packages/torch/utils/data/_utils/fetch.py", 54, "fetch", "torch.utils.data._utils.fetch")
LIST = FETCHER._replace(function="<listcomp>")
COLLATE = Spot(
    "/lib/site-packages/torch/utils/data/_utils/collate.py", 20, "default_collate", "torch.utils.data._utils.collate"
)
ITEM = Spot("/home/me/train.py", 42, "__getitem__", "__main__")
HELPER = Spot("/home/me/helpers.py", 5, "shrink", "helpers")
RESIZE = Spot("/lib/site-packages/PIL/Image.py", 9, "resize", "PIL.Image")
CALL = Spot("/lib/site-packages/torchvision/transforms.py", 3, "_call_impl", "torchvision.transforms")
LOOP = Spot("/home/me/train.py", 7, "main", "__main__")
DRAWING = Spot("/lib/site-packages/torch/utils/data/dataloader.py", 700, "_next_index", "torch.utils.data.dataloader")
QUEUE = Spot("/usr/lib/python3/queue.py", 1, "get", "queue")
FOLDER = Spot("/lib/site-packages/torchvision/datasets/folder.py", 245, "__getitem__", "torchvision.datasets.folder")


def profile_of(*stacks: tuple[tuple[Spot, ...], int]) -> StackProfile:
    """So many samples of each stack, of 1 ms."""
    profile = StackProfile()
    for stack, samples in stacks:
        for _ in range(samples):
            profile.add(stack, StackTime(MS, MS // 2))
    return profile


# -- the profile -------------------------------------------------------------------------------------------------------

names = st.text(st.characters(), max_size=9) | st.sampled_from(["/a;b\t\nc.py", "f;g", "x" * 900])
spots = st.builds(Spot, names, st.integers(0, 1 << 20), names, names)
times = st.builds(StackTime, *[st.integers(0, 1 << 40)] * 3)
contents = st.lists(st.tuples(st.lists(spots, min_size=1, max_size=4).map(tuple), times), max_size=30)


@given(contents, st.integers(2, 4000))
def test_a_profile_is_the_same_when_it_is_unpacked_as_far_as_it_fits(content, most):
    profile = StackProfile()
    for stack, time in content:
        profile.add(stack, time)
    back = StackProfile.unpacked(profile.packed(1 << 24))
    assert (back.times, back.samples) == (profile.times, profile.samples)
    packed = profile.packed(most)
    cut = StackProfile.unpacked(packed)
    assert len(packed) <= most or not cut.times.keys() - {()}
    assert cut.wall_ns == profile.wall_ns or not profile.wall_ns
    kept = [profile.times[stack].wall_ns for stack in cut.times if stack]
    assert all(time.wall_ns <= min(kept) for stack, time in profile.times.items() if stack not in cut.times and kept)
    for row in profile.folded("root", MAX_BYTES).decode().split("\n")[:-1]:
        frames, _, micros = row.rpartition(" ")
        assert int(micros) > 0
        assert len(frames.split(";")) - 1 in {len(stack) for stack in profile.times} | {1}


# -- the call of a framework's loop -----------------------------------------------------------------------------------

HF_MAIN = Spot("/home/me/hf.py", 13, "main", "__main__")
HF_TRAIN = Spot(f"{SITE}transformers/trainer.py", 2000, "train", "transformers.trainer")
HF_STEP = HF_TRAIN._replace(line=2300, function="training_step")
BERT = Spot(
    f"{SITE}transformers/models/bert/modeling_bert.py", 120, "forward", "transformers.models.bert.modeling_bert"
)
OWN_MODEL = Spot("/home/me/model.py", 30, "forward", "model")
LINEAR = Spot(f"{SITE}torch/nn/modules/linear.py", 130, "forward", "torch.nn.modules.linear")
BACKWARDS = Spot(f"{SITE}torch/autograd/__init__.py", 350, "backward", "torch.autograd")
TENSOR = Spot(f"{SITE}torch/_tensor.py", 600, "backward", "torch._tensor")
ADAM = Spot(f"{SITE}torch/optim/adam.py", 200, "step", "torch.optim.adam")


@pytest.mark.parametrize("model", [BERT, OWN_MODEL], ids=["a library's model", "the user's model"])
def test_below_a_framework_s_loop_the_line_of_the_model_is_named(model):
    """The user's own line there is a single call, of the training: it says nothing."""
    below = (HF_STEP, HF_TRAIN, HF_MAIN)
    profile = profile_of(
        ((LINEAR, model, *below), 60), ((BACKWARDS, TENSOR, *below), 50), ((ADAM, *below), 10), ((HF_TRAIN, HF_MAIN), 1)
    )
    lines = line_shares(profile, STEP)
    found = [(line.file, line.line, round(line.share, 2)) for line in lines]
    assert found[:2] == [(model.file, model.line, 0.5), (HF_STEP.file, HF_STEP.line, 0.41)]
    assert all(line.file != HF_MAIN.file for line in lines)


def test_a_line_of_the_user_s_own_loop_is_named_whatever_it_calls():
    """One heavy call, a backward pass, or all calls in one line are no framework's loop."""
    heavy = Spot(f"{SITE}scipy/optimize.py", 5, "minimize", "scipy.optimize")
    for stacks in (
        [((heavy, LOOP), 95), ((BACKWARDS, TENSOR, LOOP._replace(line=8)), 5)],
        [((BACKWARDS, TENSOR, LOOP), 95), ((LINEAR, LOOP._replace(line=6)), 5)],
        [((LINEAR, LOOP), 50), ((BACKWARDS, TENSOR, LOOP), 50)],
    ):
        line = line_shares(profile_of(*stacks), STEP)[0]
        assert (line.file, line.line) == (LOOP.file, LOOP.line)


def test_a_profile_is_limited():
    profile = profile_of(*(((Spot("/a.py", n, "f", "m"),), 1) for n in range(MAX_STACKS + 100)))
    assert len(profile.times) == MAX_STACKS + 1, "the others are summed up"
    assert profile.wall_ns == (MAX_STACKS + 100) * MS
    few = [((Spot("/a.py", n, "f" * 50, "m"), FETCHER), 1) for n in range(400)]
    cut = StackProfile.unpacked(profile_of(((ITEM, FETCHER), 50), *few).packed(4000))
    assert (ITEM, FETCHER) in cut.times, "the longest are kept"
    assert len(cut.times) < 401
    path = f"/scratch/{'experiment-with-a-long-name/' * 30}train.py"
    packed = profile_of(*[((ITEM._replace(file=path, line=n), FETCHER), 1) for n in range(100)]).packed(10_000)
    assert packed.count(path.encode()) == 1


@pytest.mark.parametrize("content", [b"", b"1 2", b"[1,2]", b"\xff\xfe", b'[1,["f"],[[0,1,"f","m"]],[[[1,1],[7]]]]'])
def test_a_damaged_profile_is_refused(content):
    with pytest.raises(ValueError, match=r"."):
        StackProfile.unpacked(content)


# -- which line --------------------------------------------------------------------------------------------------------

# Stacks with their samples, the kind of work, and the lines that are named: place, function, call and share.
NAMED = {
    "the user's innermost line, and the function that it called": (
        [((RESIZE, HELPER, ITEM, FETCHER), 75), ((ITEM, FETCHER), 25)], FETCH,
        [("helpers.py:5", "shrink", "Image.resize", 0.75), ("train.py:42", "__getitem__", None, 0.25)],
    ),
    "not a function that only passes a call on": (
        [((RESIZE, CALL, CALL, ITEM, FETCHER), 50)], FETCH, [("train.py:42", "__getitem__", "Image.resize", 1.0)],
    ),
    "a comprehension is part of its function": (
        [((ITEM._replace(function="<genexpr>"), ITEM, FETCHER), 60), ((ITEM, FETCHER), 40)], FETCH,
        [("train.py:42", "__getitem__", None, 1.0)],
    ),
    "a batch that libraries make alone has the library's line": (
        [((RESIZE, FOLDER, FETCHER, LOOP), 60), ((COLLATE, FETCHER, LOOP), 40)], FETCH,
        [("folder.py:245", "__getitem__", "Image.resize", 0.6), ("fetch.py:54", "fetch", "collate.default_collate", 0.4)],
    ),
    "the user's line comes first unless a library's takes twice as much": (
        [((ITEM, FETCHER, LOOP), 40), ((COLLATE, FETCHER, LOOP), 60)], FETCH,
        [("train.py:42", "__getitem__", None, 0.4), ("fetch.py:54", "fetch", "collate.default_collate", 0.6)],
    ),
    "of a wait for workers only the sampler counts": (
        [((ITEM, DRAWING, LOOP), 60), ((QUEUE, LOOP), 70)], SAMPLER, [("train.py:42", "__getitem__", None, 1.0)],
    ),
    "few samples name no line": ([((ITEM, FETCHER), 20), ((RESIZE, ITEM, FETCHER), MIN_SAMPLES - 21)], FETCH, []),
    "unless it is sure": ([((ITEM, FETCHER), MIN_SAMPLES // 2)], FETCH, [("train.py:42", "__getitem__", None, 1.0)]),
    "but not of too few": ([((ITEM, FETCHER), MIN_SAMPLES // 2 - 1)], FETCH, []),
    "nor with too few in the sampler": ([((ITEM, DRAWING, LOOP), 9), ((QUEUE, LOOP), 300)], SAMPLER, []),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_which_line_is_named(case):
    stacks, work, expected = NAMED[case]
    found = line_shares(profile_of(*stacks), work)
    assert [(one.place, one.function, one.calls, one.share) for one in found] == expected


def test_a_line_comes_by_all_that_it_calls_and_has_one_share():
    """One that is split over the functions of a library is not smaller for it."""
    other = Spot("/home/me/train.py", 50, "load", "train")
    opens = [Spot(f"{SITE}zipfile.py", 1300 + n, name, "archives") for n, name in enumerate(("read", "tell", "seek"))]
    calls = [((each, ITEM, FETCHER), 20) for each in opens]
    lines = line_shares(profile_of(((other, FETCHER), 40), *calls), FETCH)
    assert [line.place for line in lines] == ["train.py:42"] * 3 + ["train.py:50"]
    first = whole_line(lines)
    assert (first.named, round(first.share, 4)) == ("__getitem__ at train.py:42", 0.6)
    assert first.error == pytest.approx(0.049, abs=1e-3)
    mostly = line_shares(profile_of((calls[0][0], 90), (calls[1][0], 10)), FETCH)
    assert whole_line(mostly).named == "archives.read at train.py:42"


def test_two_functions_of_a_library_are_not_one_although_the_same_is_to_be_done():
    """A line is not named with a function that it does not call."""
    converts, resizes = (
        Spot(f"{SITE}PIL/Image.py", n, name, "PIL.Image") for n, name in ((1, "convert"), (2, "resize"))
    )
    other = ITEM._replace(line=47)
    lines = line_shares(profile_of(((converts, ITEM, FETCHER), 60), ((resizes, other, FETCHER), 40)), FETCH)
    first = whole_line(lines)
    assert (first.named, round(first.share, 2)) == ("Image.convert at train.py:42", 0.6)


# A frame of a library, and what is advised about the user's lines that call it.
KNOWN = {
    "pandas.core.indexing:_getitem_axis": "pandas indexing at train.py:42 and train.py:43: take the columns out as arrays",
    "pandas.core.series:__getitem__": "pandas indexing at train.py:42 and train.py:43: take the columns out as arrays",
    "zipfile:_RealGetContents": "ZipFile at train.py:42 and train.py:43: open it once (in each worker)",
    "h5py._hl.files:make_fid": "h5py.File at train.py:42 and train.py:43: open it once (in each worker)",
    "random:sample": "random.sample at train.py:42 and train.py:43: draw from a list or an array",
    "json.decoder:raw_decode": "decoder.raw_decode at train.py:42 and train.py:43: parse the files once",
    "PIL.Image:resize": "Image.resize at train.py:42 and train.py:43: decode no larger than needed",
    "pandas.core.groupby:sum": "take groupby.sum at train.py:42 out of the loader: do it once",
    "zipfile:read": "take zipfile.read at train.py:42 out of the loader: do it once",
}


@pytest.mark.parametrize("frame", KNOWN)
def test_what_is_known_of_a_library_is_said_for_all_lines_that_use_it(frame):
    module, _, function = frame.partition(":")
    spot = Spot(f"{SITE}{module.replace('.', '/')}.py", 9, function, module)
    lines = line_shares(profile_of(((spot, ITEM, FETCHER), 50), ((spot, ITEM._replace(line=43), FETCHER), 40)), FETCH)
    first, second = line_advice(ONE_WORKER, FETCH, whole_line(lines), cause=CPU)
    assert first.action.startswith(KNOWN[frame])
    assert (first.predicted_speedup is None) == (module == "PIL.Image"), "an image still has to be decoded"
    assert second.predicted_speedup > 1
    if " and " in first.action:
        assert "100 % of each fetch" in first.because


def test_samples_in_the_loop_of_a_fetch_count_for_the_code_that_it_calls():
    profile = profile_of(((ITEM, FETCHER), 4), ((LIST, FETCHER), 36), ((COLLATE, FETCHER._replace(line=57)), 40))
    found = line_shares(profile, FETCH, sample_code=(ITEM.file, 44, "__getitem__"))
    named = [(one.place, one.function, one.calls, one.share) for one in found]
    assert named == [
        ("train.py:44", "__getitem__", None, 0.45),
        ("fetch.py:57", "fetch", "collate.default_collate", 0.5),
        ("train.py:42", "__getitem__", None, 0.05),
    ]


def test_how_much_of_its_time_a_line_and_the_rest_hold_the_gil():
    profile = profile_of(((RESIZE, ITEM, FETCHER), 60), ((ITEM, FETCHER), 30), ((COLLATE, FETCHER), 10))
    for stack, ms in (((RESIZE, ITEM, FETCHER), 15), ((ITEM, FETCHER), 30)):
        profile.times[stack] = profile.times[stack]._replace(gil_ns=ms * MS)
    first = line_shares(profile, FETCH)[0]
    assert (first.share, first.gil_ratio, first.rest_gil_ratio) == (0.6, 0.25, 0.75)


@pytest.mark.parametrize(
    ("stacks", "work", "errors"),
    [
        ([((ITEM, FETCHER), 25), ((RESIZE, ITEM, FETCHER), 75)], FETCH, [0.043] * 2),
        ([((ITEM, FETCHER), 100), ((RESIZE, ITEM, FETCHER), 300)], FETCH, [0.022] * 2),
        ([((ITEM, FETCHER), 60)], FETCH, [1.5 / 60]),  # not all of the work for sure
        ([((ITEM, DRAWING), 25), ((RESIZE, ITEM, DRAWING), 75), ((QUEUE, LOOP), 300)], SAMPLER, [0.043] * 2),
    ],
)
def test_a_share_is_as_sure_as_it_has_samples(stacks, work, errors):
    profile = profile_of(*stacks)
    profile.add((ITEM, FETCHER), StackTime(), samples=0)  # time without a sample makes no share surer
    assert [found.error for found in line_shares(profile, work)] == [pytest.approx(each, abs=5e-4) for each in errors]


def test_a_script_is_the_user_s_and_no_file_of_the_package():
    package = Path(telemetry.__file__).parent
    assert [path for path in package.rglob("*.py") if not is_library(str(path))] == []
    assert not any(map(is_library, [f"{package}-runs/train.py", "/home/me/train.py", "train.py"]))


# -- what is written ---------------------------------------------------------------------------------------------------


def test_the_folder_keeps_the_newest_profiles_of_a_rank(tmp_path):
    folder = tmp_path / "profiles"
    write_profile(folder, "rank-1.5.stall-0.unknown.folded", b"a 1\n")
    for number in range(MAX_FILES + 3):
        name = f"rank-0.5.stall-{number}.workers_cpu_bound.folded"
        write_profile(folder, name, b"a;b 1\n" * 100_000)
        os.utime(folder / name, (number, number))
    kept = {path.name.split(".")[0] + path.name.split(".")[2] for path in folder.iterdir()}
    assert kept == {"rank-1stall-0", *(f"rank-0stall-{number}" for number in range(3, MAX_FILES + 3))}
    assert all(path.stat().st_size <= MAX_BYTES for path in folder.iterdir())


def a_stalled_run(tmp_path, source):
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
    (row,) = [shown for shown in text_of(processes).splitlines() if "data.py:2 " in shown]
    assert row.split() == ["61.0", "%", "data.py:2", "load", "Image.resize", "image", "=", "image.resize((8,", "8))"]
    os.utime(source, (4_000_000_000, 4_000_000_000))
    assert "image.resize((8" not in text_of(processes), "the file has changed since"


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
    assert (stall["rank"], stall["evidence"]["lines"]) == (0, [code])


# -- what a line is predicted to cost: the two what-ifs, and the sentence of the verdict -------------------------------


def a_line(share: float, cpu_share: float | None = None, error: float = 0.0, **more: float) -> LineShare:
    cpu_share = share if cpu_share is None else cpu_share
    return LineShare("/home/me/train.py", 42, "load", "Image.resize", share, cpu_share, error, **more)


def fetches(number: int, compute: float = 0.05):
    """So many in a second, on the CPU, of one worker."""
    in_all = dict(fetches=number, steps=number, wait=1 - compute, compute=compute, cores=8.0, process_cpu=compute)
    return evidence_over([with_workers(busy=1.0, cpu=1.0, workers=1, **in_all)])


ONE_WORKER = fetches(10, 0.4)
"""Ten fetches of 100 ms in a second, with 40 ms of compute each."""

ONE_CORE = evidence_over(
    [
        with_workers(
            busy=1.0, cpu=0.6, blocked=0.4, workers=1, fetches=10, steps=10, wait=0.6, compute=0.4, process_cpu=0.4,
            cores=1.0,
        )
    ]
)  # fmt: skip
OWN = evidence_over([a_slice(source="training_thread", wait=0.6, compute=0.4)])
STEPS = evidence_over([CASES["gc_pause"]])
SAVES = evidence_over([CASES["checkpoint"]])
PYTHON_REMAINS = dict(gil_ratio=0.0, rest_gil_ratio=1.0)
CPU = "workers_cpu_bound"

# Evidence, cause, kind of work, line, then the least and the most that removing it brings, and the same of halving it.
WHAT_IFS = {
    "50 ms of a fetch remain, and 40 of compute": (ONE_WORKER, CPU, FETCH, a_line(0.5), (None, 2.0), (None, 1.33)),
    "a fetch cannot become faster than the compute": (ONE_WORKER, CPU, FETCH, a_line(0.9), (None, 2.5), (None, 1.82)),
    "a line that waits leaves its CPU time to the cores": (
        ONE_CORE, "workers_io_bound", FETCH, a_line(0.4, 0.0), None, None,
    ),
    "one that computes does not": (
        ONE_CORE, "workers_io_bound", FETCH, a_line(0.4, 0.66), (None, 1.66), (None, 1.25),
    ),
    "python that remains takes turns with sending, 5 ms": (
        fetches(20), CPU, FETCH, a_line(0.8, **PYTHON_REMAINS), (50 / 15, 5.0), (None, 1.67),
    ),
    "not if they take turns already": (
        fetches(20), CPU, FETCH, a_line(0.8, gil_ratio=1.0, rest_gil_ratio=1.0), (None, 5.0), (None, 1.67),
    ),
    "nor if what remains releases the GIL": (fetches(20), CPU, FETCH, a_line(0.8), (None, 5.0), (None, 1.67)),
    "nor if much remains": (fetches(20), CPU, FETCH, a_line(0.4, **PYTHON_REMAINS), (None, 1.67), (None, 1.25)),
    "few samples, too, make one range": (
        fetches(20), CPU, FETCH, a_line(0.8, error=0.05, **PYTHON_REMAINS), (50 / 20, 10.0), (None, 1.67),
    ),
    "an own fetch": (OWN, "loader_on_training_thread", WAIT, a_line(0.5), (None, 1 / 0.7), (None, 1 / 0.85)),
    "few samples predict a range: of 70 to 90 %": (
        STEPS, "gc_pause", STEP, a_line(0.8, error=0.05), (1 / 0.3, 10.0), (None, 1.67),
    ),
    "a line of which all samples are": (
        STEPS, "gc_pause", STEP, a_line(1.0, error=0.025), (20.0, 40.0), (None, 1.95),
    ),
    "a checkpoint": (SAVES, "checkpoint", CHECKPOINT, a_line(1.0), (None, 2.0), (None, 1.33)),
}  # fmt: skip


@pytest.mark.parametrize("case", WHAT_IFS)
def test_what_a_faster_line_brings(case):
    evidence, cause, kind, line, *expected = WHAT_IFS[case]
    told = line_advice(evidence, kind, line, cause=cause)
    found = [(each.predicted_low, each.predicted_speedup) for each in told]
    assert found == [tuple(each and pytest.approx(each, abs=0.01) for each in one) for one in expected if one]
    assert all("Image.resize at train.py:42" in each.action for each in told)


def test_the_verdict_says_what_remains():
    assert line_verdict(ONE_WORKER, FETCH, a_line(0.61), cause=CPU) == (
        "61 % of each fetch is Image.resize at train.py:42; without it a fetch takes 39.0 ms, predicted 2.5 times the "
        "steps per second"
    )
    said = line_verdict(ONE_WORKER, FETCH, replace(a_line(0.3), calls=None), cause=CPU)
    assert said.startswith("30 % of each fetch is load at"), "it called no library"
    said = line_verdict(STEPS, STEP, a_line(0.8, error=0.05), cause="gc_pause")
    assert said.endswith("predicted 3.33 to 10 times the steps per second")
    removed, _ = line_advice(ONE_WORKER, FETCH, a_line(0.5), cause=CPU)
    assert removed.because == "50 % of each fetch is this line: 50.0 ms of 100.0 ms"


@pytest.mark.parametrize(("cause", "part"), CASES.items(), ids=[*CASES])
def test_no_line_is_predicted_to_slow_a_run_down(cause, part):
    evidence, cause = evidence_over([part]), cause.split(",")[0]
    for kind in (FETCH, WAIT, SAMPLER, STEP, CHECKPOINT):
        for share in (0.05, 0.5, 1.0):
            assert all(each.predicted_speedup >= 1 for each in line_advice(evidence, kind, a_line(share), cause=cause))
            assert line_verdict(evidence, kind, a_line(share), cause=cause)
