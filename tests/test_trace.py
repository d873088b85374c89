"""``telemetry trace``: small traces by hand, any one by its sums, real ones against other tools, and any bytes within bounds."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

from telemetry.cli import main
from telemetry.trace.events import NoTraceError, TraceError
from telemetry.trace.steps import difference, intersection, length, union, within
from telemetry.trace.trace_file import read_trace

ROOT = Path(__file__).parents[1]
TRACES = Path(__file__).parent / "traces"
RIVALS = json.loads((TRACES / "rivals.json").read_text())
REAL = sorted(name for name in RIVALS if name.endswith(".gz"))
WORKERS0 = TRACES / "v100_resnet50_workers0.json.gz"
WHOLE = WORKERS0.read_bytes()
CATEGORIES = ["Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other"]
Done = namedtuple("Done", "returncode stdout stderr")


def x(cat, name, ts, dur, tid=1, **args):
    keys = {"external": "External id", "blocks": "blocks per SM", "occupancy": "est. achieved occupancy %"}
    args = {keys.get(key, key.replace("_", " ") if key.startswith("Input") else key): v for key, v in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def step(number, ts, dur):
    return x("user_annotation", f"ProfilerStep#{number}", ts, dur)


def launch(ts, correlation, dur=2, name="cudaLaunchKernel", external=-1, tid=1):
    return x("cuda_runtime", name, ts, dur, tid, correlation=correlation, external=external)


def kernel(ts, dur, correlation, stream=7, name="k", cat="kernel", external=-1, device=0, **args):
    return x(cat, name, ts, dur, 7, stream=stream, correlation=correlation, external=external, device=device, **args)


def write(tmp_path, events, name="t.json", **head):
    path = tmp_path / name
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return path


# -- figures, by hand


def test_every_microsecond_is_in_the_first_category_that_covers_it(tmp_path):
    """One step of 100 us: each category is given 20 us or what is named, the next starts 10 us earlier."""
    events = [
        step(4, 0, 100),
        launch(0, 1, dur=1),
        kernel(0, 10, 1),
        kernel(5, 10, 1, cat="gpu_memcpy", name="Memcpy HtoD (Pinned -> Device)", bytes=1000),  # 5 of its own
        kernel(10, 10, 1, cat="gpu_memset", name="Memset (Device)"),  # 5
        kernel(15, 15, 1, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"),  # 10
        x("cuda_runtime", "cudaEventQuery", 25, 10),  # 5
        x("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 30, 25),  # 20
        x("cpu_op", "aten::add", 50, 20),  # 15
        x("user_annotation", "my own mark", 60, 30),  # none: Other
        x("python_function", "train.py(3): main", 0, 100),
    ]
    trace = read_trace(write(tmp_path, events))
    (only,) = trace.steps
    assert only.step == 4
    assert only.seconds == pytest.approx(100e-6)
    assert list(only.categories) == CATEGORIES
    expected = [10, 5, 5, 10, 5, 20, 15, 30]
    assert [1e6 * s for s in only.categories.values()] == pytest.approx(expected)
    assert [100 * s for s in trace.average.categories.values()] == pytest.approx(expected)
    assert trace.gpu.utilization_ratio == pytest.approx(0.25)  # any kernel: 0-10 and 15-30
    assert trace.gpu.sm_efficiency_ratio is None
    assert trace.gpu.occupancy_ratio is None


def test_a_step_lasts_until_its_kernels_have_ended(tmp_path):
    """tensorboard: the step ends with its last kernel, the next begins there; the first after earlier work."""
    events = [
        kernel(90, 15, 77),  # launched before the first step
        *(step(i, 100 * i, 100) for i in (1, 2, 3)),
        launch(110, 1),
        kernel(130, 100, 1),  # until 230
        launch(210, 2),
        launch(215, 3),
        kernel(230, 10, 2),
        kernel(240, 5, 3),
        launch(298, 4, dur=9),  # reaches beyond its step: belongs to none
        kernel(310, 500, 4),
    ]
    trace = read_trace(write(tmp_path, events))
    assert [(s.step, round(1e6 * s.seconds)) for s in trace.steps] == [(1, 125), (2, 70)]
    assert trace.notes == ["the last 1 step(s) are left out: the trace ends before their kernels do"]


def test_a_torn_last_step_is_left_out(tmp_path):
    events = [step(1, 0, 100), step(2, 100, 100)]
    for i in range(10):
        events += [launch(i * 10, i), kernel(i * 10 + 1, 1, i)]
    for i in range(7):  # fewer than 80 % of 10
        events += [launch(100 + i * 10, 50 + i), kernel(101 + i * 10, 1, 50 + i)]
    assert len(read_trace(write(tmp_path, events)).steps) == 1
    events += [launch(190, 90), kernel(191, 1, 90)]
    assert len(read_trace(write(tmp_path, events)).steps) == 2


def test_fractions_of_a_microsecond_are_rounded_as_hta_does(tmp_path):
    """Starts up, ends down: 10.2-20.9 is 11-20, 30.5-30.9 is 31-30 and counts negative."""
    events = [launch(0, 1), kernel(10.2, 10.7, 1), launch(1, 2), kernel(30.5, 0.4, 2), launch(2, 3), kernel(40.0, 5, 3)]
    temporal = read_trace(write(tmp_path, events)).temporal
    assert temporal.compute_ratio == pytest.approx((9 - 1 + 5) / (45 - 11))
    assert temporal.idle_ratio == pytest.approx(1 - (9 - 1 + 5) / (45 - 11))


def test_what_was_launched_in_the_last_step_is_left_out_of_the_streams(tmp_path):
    """As HTA does: some of its kernels may be missing. That step begins with its annotation on the host, or the device."""
    events = [
        *(step(i, 100 * i, 100) for i in (1, 2)),
        launch(110, 1), kernel(120, 10, 1),
        launch(210, 2), kernel(220, 30, 2),
        kernel(150, 10, 3),  # its launch is not in the trace
    ]  # fmt: skip
    assert read_trace(write(tmp_path, events)).temporal.idle_ratio == 0
    events.append(x("gpu_user_annotation", "ProfilerStep#2", 215, 50, stream=7))
    assert read_trace(write(tmp_path, events)).temporal.idle_ratio == pytest.approx(90 / 130)


def test_operators_are_found_by_time_where_ids_do_not_match(tmp_path):
    events = [
        x("cpu_op", "aten::linear", 0, 30, external=1),
        x("cpu_op", "aten::addmm", 5, 20, external=2),
        x("cpu_op", "aten::gemm", 5, 20, external=3),  # the later of two that look the same is the inner one
        launch(10, 901, external=901, tid="1"),  # the same thread: old traces write both
        kernel(50, 7, 901, external=901, name="ampere_sgemm_128x64_nn"),
        launch(10, 902, external=902, tid=2),  # another thread: within no operator
        kernel(60, 3, 902, external=902),
    ]
    trace = read_trace(write(tmp_path, events))
    gemm, linear, addmm = trace.operators
    assert (gemm.name, linear.name, addmm.name) == ("aten::gemm", "aten::linear", "aten::addmm")
    assert gemm.device_seconds == pytest.approx(7e-6)
    assert gemm.device_ratio == pytest.approx(0.7)
    assert linear.host_seconds == pytest.approx(10e-6)
    assert (addmm.host_seconds, addmm.calls) == (0, 1)
    assert gemm.tensor_core_ratio == 0


def test_amd_without_what_it_does_not_say(tmp_path):
    events = [
        step(1, 0, 100),
        x("cuda_runtime", "hipLaunchKernel", 5, 2, stream="0x0", correlation=3),
        kernel(10, 10, 3, stream=0, name="Cijk_Alik_Bljk_HB", device=2),
        kernel(30, 5, 3, stream=0, cat="gpu_memcpy", name="Memcpy HtoD (Host -> Device)", device=2),
    ]
    trace = read_trace(write(tmp_path, events, deviceProperties=[{"id": 2, "name": "AMD Instinct MI250X"}]))
    assert trace.device == "AMD Instinct MI250X"
    assert trace.gpu.tensor_core_ratio is None
    assert trace.gpu.occupancy_ratio is None
    (copy,) = trace.memcpy
    assert (copy.kind, copy.pageable, copy.bytes, copy.bandwidth_bytes_per_second) == ("HtoD", None, None, None)


def test_events_that_make_no_sense_are_counted_and_passed_over(tmp_path):
    good = [step(1, 0, 100), x("cpu_op", "aten::add", 10, 20)]
    bad = [
        x("cpu_op", "a", "soon", 1), x("cpu_op", "a", 1, -5), x("cpu_op", 7, 1, 1), 5, None, "x", [],
        {"ph": "X", "cat": ["kernel"], "ts": 1, "dur": 1}, {"ph": "X", "cat": "kernel", "dur": 1},
        kernel(1, 1, "five"), x("cpu_op", "a", None, 1),
    ]  # fmt: skip
    mixed = [event for pair in zip(bad, good * 7, strict=False) for event in pair][: 2 * len(good)] + bad
    trace = read_trace(write(tmp_path, mixed))
    assert [round(1e6 * s) for s in trace.steps[0].categories.values()] == [0, 0, 0, 0, 0, 0, 20, 80]
    assert trace.notes[0].startswith(f"{len(bad) + 2} event(s)")


# -- advice


def test_advice_on_synchronisations_layouts_and_unused_memory(tmp_path):
    """Ten steps of 1 ms; in each an .item() after which the GPU idles for 300 us."""
    events = [launch(20_000, 999, name="cudaDeviceSynchronize")]  # after the steps: the profiler's own
    for i in range(10):
        at, c = 1000 * i, 10 * i
        events += [
            step(i, at, 1000),
            x("cpu_op", "aten::cudnn_convolution", at, 20, external=c + 1),
            launch(at + 5, c + 1, external=c + 1),
            kernel(at + 10, 300, c + 1, external=c + 1, name="cudnn::nchwToNhwcKernel<half>"),
            launch(at + 12, c + 2, external=c + 1),
            kernel(at + 310, 300, c + 2, external=c + 1, name="sm80_xmma_fprop_implicit_gemm_f16f16_tensor16x8x16"),
            x("cpu_op", "aten::item", at + 30, 600, external=c + 2),
            x("cpu_op", "aten::_local_scalar_dense", at + 31, 598, external=c + 3),
            x("python_function", "train.py(40): step", at + 1, 900),
            launch(at + 40, c + 4, dur=580, name="cudaStreamSynchronize", external=c + 3),
            launch(at + 908, c + 3),
            kernel(at + 910, 90, c + 3, name="elementwise"),
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at, "tid": 1, "pid": 1,
             "args": {"Device Type": 1, "Device Id": 0, "Total Reserved": 2_000_000_000 + i, "Total Allocated": 1}},
        ]  # fmt: skip
    properties = [{"id": 0, "name": "NVIDIA A100", "totalGlobalMem": 40_000_000_000, "computeMajor": 8}]
    trace = read_trace(write(tmp_path, events, deviceProperties=properties))
    found = {each.action.split(":")[0].split(" (")[0]: each for each in trace.advice}
    assert set(found) == {"remove a synchronisation", "keep model and batch in channels_last", "use a larger batch"}
    assert found["remove a synchronisation"].share_ratio == pytest.approx(0.3, abs=0.001)
    assert "from aten::_local_scalar_dense at train.py(40): step" in found["remove a synchronisation"].because
    assert found["keep model and batch in channels_last"].share_ratio == pytest.approx(0.3, abs=0.001)
    assert "95 % of the GPU's memory" in found["use a larger batch"].because
    assert trace.peak_memory_bytes == 2_000_000_009
    (wait,) = trace.synchronizations
    assert (wait.operator, wait.within, wait.calls) == ("aten::_local_scalar_dense", "aten::item", 10)
    assert wait.call_site == "train.py(40): step"


def test_waiting_for_a_batch_is_not_blamed_on_a_synchronisation(tmp_path):
    """The GPU idles for 500 us after .item(): 100 us of Python, then 400 us in next()."""
    events = [
        step(1, 0, 1000),
        launch(0, 1), kernel(10, 390, 1),
        launch(20, 2, dur=380, name="cudaStreamSynchronize"),
        x("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 500, 400),
        launch(895, 3), kernel(900, 100, 3),
    ]  # fmt: skip
    loading, waiting = read_trace(write(tmp_path, events)).advice
    assert "num_workers" in loading.action
    assert loading.share_ratio == pytest.approx(0.4, abs=0.003)
    assert "synchronisation" in waiting.action
    assert waiting.share_ratio == pytest.approx(0.1, abs=0.003)


def test_a_launch_bound_stretch(tmp_path):
    """Fifty kernels of 2 us, each launched 8 us after the one before has ended."""
    events = [step(1, 0, 1000)]
    for i in range(50):
        events += [launch(100 + 10 * i, i), kernel(104 + 10 * i, 2, i)]
    trace = read_trace(write(tmp_path, events))
    (stretch,) = trace.launch_bound
    assert (stretch.step, stretch.launches) == (1, 49)
    assert stretch.idle_ratio == pytest.approx(0.8, abs=0.01)
    (advice,) = trace.advice
    assert "torch.compile" in advice.action
    assert advice.share_ratio == pytest.approx(49 * 8 / 1000)
    for event in events:  # the same kernels, launched far ahead: nothing to win
        event["ts"] = 90 if event["cat"] == "cuda_runtime" else event["ts"]
    assert read_trace(write(tmp_path, events)).launch_bound == []


# -- any trace


spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (float(p[0]), float(sum(p)))), max_size=9
)


@settings(deadline=None, max_examples=300)
@given(spans, spans, st.tuples(st.integers(0, 50), st.integers(0, 50)))
def test_interval_arithmetic_against_sets_of_moments(one, other, window):
    def moments(intervals):
        return {m for start, end in intervals for m in range(int(start), int(end))}

    a, b = union(one), union(other)
    assert (moments(a), moments(b)) == (moments(one), moments(other))
    assert all(x[1] < y[0] for x, y in zip(a, a[1:], strict=False))
    assert moments(intersection(a, b)) == moments(a) & moments(b)
    assert moments(difference(a, b)) == moments(a) - moments(b)
    assert moments(within(a, *map(float, sorted(window)))) == moments(a) & set(range(*sorted(window)))
    assert length(difference(a, b)) == len(moments(a) - moments(b))


def nanoseconds(most):
    return st.floats(0, most).map(lambda microseconds: round(microseconds, 3))


rows = st.lists(
    st.tuples(
        st.sampled_from(["kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cpu_op", "user_annotation", "cuda_sync"]),
        st.sampled_from(["k", "nccl:all_reduce", "ncclKernel_X", "enumerate(DataLoader)#x.__next__", "ProfilerStep#1",
                         "ProfilerStep#2", "cudaDeviceSynchronize", "aten::copy_", "Optimizer.zero_grad#SGD.zero_grad"]),
        st.integers(0, 200) | nanoseconds(200), st.integers(0, 80) | nanoseconds(80),
        st.integers(-1, 5), st.integers(-1, 3), st.integers(-1, 9),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(rows)
def test_whatever_is_in_a_trace_categories_sum_to_the_step(tmp_path_factory, found):
    events = [
        x(cat, name, ts, dur, tid, correlation=correlation, stream=stream, external=correlation)
        for cat, name, ts, dur, correlation, stream, tid in found
    ]
    path = write(tmp_path_factory.getbasetemp(), events)
    try:
        trace = read_trace(path)
    except NoTraceError:  # nothing in it lasts
        return
    for each in trace.steps:
        assert sum(each.categories.values()) == pytest.approx(each.seconds, abs=1e-9)
        assert min(each.categories.values()) >= -1e-12
    assert sum(trace.average.categories.values()) == pytest.approx(1)
    assert all(0 <= a.share_ratio <= 1 + 1e-9 for a in trace.advice)


# -- real traces


@pytest.fixture(scope="module", params=REAL)
def real(request):
    return read_trace(TRACES / request.param), RIVALS[request.param]


def test_the_breakdown_is_that_of_tensorboard(real):
    trace, rivals = real
    theirs = rivals["torch-tb-profiler 0.4.3"]
    assert trace.average.seconds == pytest.approx(theirs["seconds"], rel=1e-6)
    if theirs["categories"]:
        ours = {name: 100 * ratio for name, ratio in trace.average.categories.items()}
        assert ours == pytest.approx(theirs["categories"], abs=0.05)
    for name, percent in theirs["gpu"].items():
        assert 100 * getattr(trace.gpu, f"{name}_ratio") == pytest.approx(percent, abs=0.05)


def test_the_streams_are_those_of_holistic_trace_analysis(real):
    trace, rivals = real
    theirs = rivals["HolisticTraceAnalysis 0.5.0"]
    for name, percent in theirs["temporal"].items():
        assert getattr(trace.temporal, f"{name}_ratio") == pytest.approx(percent / 100, abs=1e-4)
    overlap = theirs["overlap"]
    assert trace.overlap_ratio == (None if overlap is None else pytest.approx(overlap / 100, abs=1e-4))
    assert {str(each.stream) for each in trace.idle} == set(theirs["idle"])
    for each in trace.idle:
        ratios = (each.host_wait_ratio, each.kernel_wait_ratio, each.other_ratio)
        shares = theirs["idle"][str(each.stream)]
        assert ratios == ((None,) * 3 if shares is None else pytest.approx([s / 100 for s in shares], abs=0.0051))


# -- the command: the goldens have its text and its JSON


@pytest.fixture
def run(capsys):
    def ran(*arguments):
        try:
            status = main(["trace", *map(str, arguments)])
        except SystemExit as leaving:
            status = leaving.code
        return Done(status, *capsys.readouterr())

    return ran


@pytest.fixture
def as_json(run):
    def read(*arguments):
        done = run(*arguments, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return read


def test_the_figures_are_one_screen_and_then_come_the_tables(run):
    screen, _, tables = run(WORKERS0).stdout.partition("\n\nstep ")
    assert len(screen.splitlines()) <= 30
    assert "DataLoader      34.6 %    62.5 ms  ##############" in screen
    assert "HtoD     pageable      6" in tables


def test_neither_torch_nor_numpy_is_needed(tmp_path):
    for name in ("torch", "numpy", "pandas"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not needed')")
    command = [sys.executable, "-m", "telemetry", "trace", str(WORKERS0), "--json"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_folder_is_a_list_by_rank_and_what_is_no_trace_is_passed_over(tmp_path, run, as_json):
    (tmp_path / "b.json").write_text(json.dumps({"not": "a trace"}))
    (tmp_path / "deep").mkdir()
    for rank in (1, 0):
        file = write(tmp_path, [x("cpu_op", "a", 1, 2)], f"deep/rank-{rank}.pt.trace.json.gz")
        file.write_bytes(gzip.compress(file.read_bytes()))
    assert [trace["rank"] for trace in as_json(tmp_path)] == [0, 1]
    assert run(tmp_path).stdout.splitlines()[0].split()[:2] == ["rank", "file"]


def test_links_in_a_folder_are_not_followed(tmp_path, run, as_json):
    (tmp_path / "outside").mkdir()
    secret = tmp_path / "outside" / "secret.json"
    secret.write_bytes(gzip.decompress(WHOLE))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.json").symlink_to(secret)
    (folder / "b.json").symlink_to("../outside/secret.json")
    (folder / "c").symlink_to(tmp_path / "outside")
    (folder / "d.json").symlink_to("/dev/zero")
    os.mkfifo(folder / "e.json")
    os.link(secret, folder / "f.txt")
    done = run(folder, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no trace in" in done.stderr
    assert as_json(folder / "a.json")["rank"] is None  # named by the user


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "damaged, cut off or not JSON (Input data was truncated)"),
        (b"\x00\x01\x02", "damaged, cut off or not JSON"),
        (b'{"traceEvents": [{"ph": "X", "na', "damaged, cut off or not JSON"),
        (WHOLE[:5000], "cut off or damaged (Compressed file ended"),
        (WHOLE[:2], "cut off or damaged (Compressed file ended"),
        (WHOLE[:5000] + b"\x55" * 3000 + WHOLE[8000:], "cut off or damaged"),
        (b'{"traceEvents": [{"ph": "X" "cat": 1}]}', "(byte 28)"),
        (b'{"traceEvents" [', "(byte 15)"),
        (b'{"traceEvents": 5}', "is not a trace of torch.profiler"),
        (b'{"other": 5}', "missing required field `traceEvents`"),
        (b'{"traceEvents": []}', "no operator, runtime call or kernel"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_clear_error(tmp_path, content, says, run):
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    alone = run(file, "--json")
    assert (alone.returncode, alone.stdout) == (1, "")
    assert alone.stderr.startswith(f"telemetry: {file} ")
    assert says in alone.stderr
    (tmp_path / "good.json.gz").write_bytes(WHOLE)
    folder = run(tmp_path, "--json")
    assert len(json.loads(folder.stdout)) == 1
    assert folder.returncode == ("is not a trace" not in alone.stderr)
    assert (says in folder.stderr) == bool(folder.returncode)


def test_what_is_no_file_is_a_clear_error(tmp_path, run):
    os.mkfifo(tmp_path / "fifo")
    for path, says in (
        (tmp_path / "none", "cannot be read: No such file or directory"),
        ("/dev/zero", "is not a regular file"),
        ("/proc/self/mem", "cannot be read: Input/output error"),
        (tmp_path / "fifo", "is not a regular file"),
        (tmp_path, "there is no trace in"),
    ):
        done = run(path)
        assert (done.returncode, done.stdout) == (1, "")
        assert says in done.stderr
    assert run(WORKERS0, "--max-bytes", "1000").stderr.count("larger than 1000 bytes uncompressed") == 1
    assert run(WORKERS0, "--max-bytes", "-1").returncode == 2


def test_names_cannot_command_the_terminal(tmp_path, run, as_json):
    name = "evil\x1b]0;title\x07\x9b31m\u202e\n"
    file = write(tmp_path, [x("cpu_op", name, 1, 2), kernel(1, 2, 1, name=name)], "a\x1bb.json")
    assert not {c for c in run(file).stdout if not c.isprintable()} - {"\n"}
    assert as_json(file)["operators"][0]["name"] == name


class Slow(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        end = time.perf_counter() + 0.004
        while time.perf_counter() < end:
            pass
        return torch.randn(8), index % 2


@pytest.mark.parametrize(("workers", "iterator"), [(0, "SingleProcess"), (2, "MultiProcessing")])
def test_a_live_recording_of_this_torch_shows_the_data_loader(tmp_path, workers, iterator, as_json):
    """In traces of newer torch the wait for a batch is an annotation, for which TensorBoard's tool shows 0."""
    file, net, measured = tmp_path / "rank7.pt.trace.json.gz", nn.Linear(8, 2), []
    plan = schedule(wait=0, warmup=1, active=4, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, with_stack=workers > 0) as profiler:
        loader = iter(DataLoader(Slow(), batch_size=4, num_workers=workers))
        for _ in range(5):
            start = time.perf_counter()
            batch, labels = next(loader)
            measured.append(time.perf_counter() - start)
            nn.functional.cross_entropy(net(batch), labels).backward()
            profiler.step()
    profiler.export_chrome_trace(str(file))
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    waits = [e for e in events if e.get("name", "").startswith("enumerate(DataLoader)#")]
    assert {e["cat"] for e in waits} == {"user_annotation"}
    assert all(iterator in e["name"] for e in waits)
    trace = as_json(file)
    assert [step["step"] for step in trace["steps"]] == [1, 2, 3, 4]
    assert (trace["rank"], trace["device"]) == (7, None)
    assert {*trace["gpu"].values(), *trace["temporal"].values()} == {None}
    for step in trace["steps"]:
        assert sum(step["categories"].values()) == pytest.approx(step["seconds"])
        assert step["categories"]["Kernel"] == 0
    if workers:
        return
    for step in trace["steps"]:  # what the loop itself saw; its next() does a little more than the annotation
        assert step["categories"]["DataLoader"] == pytest.approx(measured[step["step"]], rel=0.1)
    assert trace["average"]["categories"]["DataLoader"] > 0.5
    assert trace["advice"][0]["action"].startswith("load batches in worker processes")


# -- the file --------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=100)
@given(st.lists(values, max_size=6), st.data(), st.binary(max_size=200))
def test_any_events_can_be_read_and_a_file_that_is_cut_off_or_goes_on_with_any_bytes_is_an_error(
    tmp_path_factory, events, data, more
):
    path = tmp_path_factory.getbasetemp() / "any.json"
    whole = write(path.parent, [x("cpu_op", "a", 1, 1), *events], path.name).read_bytes()
    assert [operator.calls for operator in read_trace(path).operators if operator.name == "a"] == [1]
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    path.write_bytes(cut)
    with pytest.raises(TraceError, match="cut off"):
        read_trace(path)
    path.write_bytes(cut + more)
    try:
        read_trace(path)
    except TraceError:
        pass


def test_what_is_not_json_but_can_be_read(tmp_path):
    event = b'{"cat": "cpu_op", "ts": 1, "dur": 1, "name": '
    words = b'[%b"ok"}, %b"nan N/A", "args": {"bytes": nan, "a": -inf, "b": N/A, "c": NaN}}, %b"\xff\x01"}]'
    path = tmp_path / "words.json"
    path.write_bytes(words % ((event,) * 3))
    trace = read_trace(path)
    assert {operator.name: operator.calls for operator in trace.operators} == {"ok": 1, "nan N/A": 1, "\ufffd ": 1}
    assert trace.notes[-1].startswith("text that is not JSON, such as nan")
    path.write_bytes(event.join([b"[", b'"\xff"}]']))
    assert read_trace(path).operators[0].name == "\ufffd"
