"""What a run without a stall spends its steps on: lines, host work, threads beyond the cores, the GIL, own collections."""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs
from torch.utils.data import DataLoader

import telemetry
from telemetry.agent import step_monitor as findings
from telemetry.diagnosis.hot_lines import line_shares
from telemetry.diagnosis.model import gain_without
from telemetry.diagnosis.step_time import StepTime, findings_of
from telemetry.diagnosis.switches import switch_findings
from telemetry.diagnosis.verdict import RankWaits, RunFacts, VerdictKind, judge
from telemetry.model.records import ANOMALY, CUDA_BLOCKING, DETERMINISTIC, PROFILER, SYNC_DEBUG
from telemetry.model.totals import GarbageTotals, Totals
from telemetry.seams.ring import Ring
from telemetry.seams.switches import switches_on
from telemetry.seams.tracker import StepTracker
from telemetry.sources.proc import ThreadLoad, ThreadLoads
from telemetry.sources.sampler import BusyThread, Sampler
from telemetry.util.clock import NS, now_ns, sleep
from telemetry.util.profiles import STEP, StackProfile, StackTime
from telemetry.util.stacks import STANDARD_LIBRARY, Spot
from tests.data_sets import Numbers
from tests.sampled_thread import often
from tests.slice_cases import a_slice
from tests.slices import evidence_over

SITE = f"{STANDARD_LIBRARY}site-packages/"
LOOP = Spot("/home/me/train.py", 20, "main", "__main__")
HELPER = Spot("/home/me/metrics.py", 5, "accuracy", "metrics")
LINEAR = Spot(f"{SITE}torch/nn/modules/linear.py", 134, "forward", "torch.nn.modules.linear")
CALL = Spot(f"{SITE}torch/nn/modules/module.py", 1789, "_call_impl", "torch.nn.modules.module")
BACKWARD = Spot(f"{SITE}torch/autograd/graph.py", 979, "_engine_run_backward", "torch.autograd.graph")
BERT = Spot(f"{SITE}transformers/models/bert/modeling_bert.py", 300, "forward", "transformers.models.bert")
WRITER = Spot(f"{SITE}torch/utils/tensorboard/writer.py", 505, "add_histogram", "torch.utils.tensorboard.writer")
NUMPY = Spot(f"{SITE}numpy/lib/histograms.py", 792, "histogram", "numpy.lib.histograms")
JSON = Spot(f"{STANDARD_LIBRARY}json/encoder.py", 200, "encode", "json.encoder")
TENSOR_TEXT = Spot(f"{SITE}torch/_tensor_str.py", 700, "_str", "torch._tensor_str")
QUEUE = Spot(f"{STANDARD_LIBRARY}queue.py", [*queue.Queue.get.__code__.co_lines()][-1][2], "get", "queue")
LOCK = Spot(f"{STANDARD_LIBRARY}threading.py", 327, "wait", "threading")

PROCESS = Spot(f"{STANDARD_LIBRARY}subprocess.py", 548, "run", "subprocess")
SOCKET = Spot(f"{STANDARD_LIBRARY}socket.py", 706, "readinto", "socket")

COMPUTE = evidence_over([a_slice(steps=100, wait=0.5, compute=9.5, seconds=10.0)])


MS = 1_000_000


def sampled(*stacks: tuple[tuple[Spot, ...], int], gil: float = 0.0, on_core: float = 1.0, wait: int = 0) -> Sampler:
    """Samples of steps: stacks, with so many samples of 1 ms each, of which a share waited for the GIL."""
    sampler, profile = Sampler(StepTracker(Ring()), sleep), StackProfile()
    for stack, samples in stacks:
        for number in range(samples):
            profile.add(stack, StackTime(MS, int(on_core * MS), MS * (number < gil * samples)))
    sampler.run[STEP] = profile
    sampler.seen.step, sampler.seen.wait = profile.wall_ns, wait * MS
    return sampler


def kinds(time: StepTime, sampler: Sampler, evidence=COMPUTE) -> list[str]:
    return [finding.kind for finding in findings_of(time, sampler, evidence)]


def over_10_seconds(blocked: float | None = None, garbage: GarbageTotals = GarbageTotals()) -> StepTime:
    ran = None if blocked is None else 10.0 * (1 - blocked)
    return StepTime(Totals(ledger_seconds={"compute": 10.0}, garbage=garbage, thread_cpu_seconds=ran))


CALM = over_10_seconds()
MODEL = ((LINEAR, CALL, LOOP), 60), ((BACKWARD, LOOP._replace(line=22)), 60)


# -- work on the host --------------------------------------------------------------------------------------------------


def test_a_logger_in_each_step_is_named_with_its_lines():
    second = LOOP._replace(line=21)
    sampler = sampled(((NUMPY, WRITER, LOOP), 40), ((NUMPY, WRITER, second), 40), ((LINEAR, CALL, LOOP), 120), wait=0)
    (finding,) = findings_of(CALM, sampler, COMPUTE)
    assert (finding.kind, finding.share_ratio) == ("host_work", pytest.approx(0.4))
    assert "40 % of each step is writer.add_histogram at train.py:20 and train.py:21" in finding.text
    assert [(line.line, line.calls) for line in finding.lines] == [(20, "writer.add_histogram")] + [
        (21, "writer.add_histogram")
    ]
    (advice,) = finding.advice
    assert advice.predicted_speedup == pytest.approx(1 / 0.6, abs=0.01)


def test_a_function_that_only_works_on_the_host_is_named_as_a_whole():
    """As one that goes through the elements of a tensor: `Tensor.__iter__`, and operators on single numbers."""
    through = Spot(f"{SITE}torch/_tensor.py", 1165, "__iter__", "torch._tensor")
    second = HELPER._replace(line=6)
    sampler = sampled(((through, HELPER, LOOP), 60), ((second, LOOP), 60), ((LINEAR, CALL, LOOP), 30), gil=0.9)
    (finding,) = findings_of(CALM, sampler, COMPUTE)
    assert "80 % of each step is accuracy at metrics.py:5 and metrics.py:6" in finding.text


def test_no_speed_up_is_predicted_for_a_part_of_a_loop():
    """The loop over a tensor ends with what its body does, some of which looks like operators."""
    through = Spot(f"{SITE}torch/_tensor.py", 1165, "__iter__", "torch._tensor")
    body = HELPER._replace(line=6)
    sampler = sampled(
        ((through, HELPER, LOOP), 60), ((HELPER, LOOP), 20), ((body, LOOP), 30), ((LINEAR, CALL, LOOP), 30)
    )
    (finding,) = findings_of(CALM, sampler, COMPUTE)
    assert "__iter__ at metrics.py:5" in finding.text
    assert finding.advice[0].predicted_speedup is None


def test_a_function_of_a_private_module_is_named_with_its_package():
    spot = Spot(f"{SITE}numpy/lib/_function_base_impl.py", 4510, "percentile", "numpy.lib._function_base_impl")
    (finding,) = line_shares(sampled(((spot, LOOP), 50)).steps, STEP)
    assert finding.calls == "numpy.percentile"


def test_a_method_is_named_with_its_class():
    """As far as its class is loaded in this process."""
    code = DataLoader.check_worker_number_rationality.__code__
    spot = Spot(code.co_filename, [*code.co_lines()][-1][2], code.co_name, DataLoader.__module__)
    (finding,) = line_shares(sampled((((spot, LOOP)), 50)).steps, STEP)
    assert finding.calls == "DataLoader.check_worker_number_rationality"


@pytest.mark.parametrize(
    ("stack", "gil", "on_core", "found"),
    [
        ((HELPER, LOOP), 0.9, 1.0, True),  # a loop in Python
        ((HELPER, LOOP), 0.1, 1.0, False),  # the line calls operators itself
        ((LOOP,), 0.9, 0.1, False),  # it sleeps while another thread holds the GIL
        ((JSON, LOOP), 0.0, 1.0, True),
        ((NUMPY, HELPER, LOOP), 0.0, 1.0, True),
        ((TENSOR_TEXT, LOOP), 0.0, 1.0, True),
        ((Spot(f"{SITE}torch/_tensor.py", 1165, "__iter__", "torch._tensor"), HELPER, LOOP), 0.0, 1.0, True),
        ((LOCK, QUEUE, LOOP), 0.0, 0.0, False),  # it may wait for batches
        ((PROCESS, HELPER, LOOP), 0.0, 0.0, True),
        ((SOCKET, LOOP), 0.0, 0.0, True),
        ((SOCKET, JSON, LOOP), 0.0, 0.0, True),  # such as a handler of a logger
        ((Spot("<os>", 0, "waitpid", "os"), LOOP), 0.0, 0.0, True),
        ((BERT, CALL, BERT, LOOP), 0.9, 1.0, False),
        ((Spot("/tmp/torchinductor_me/ab/cabc.py", 9, "call", "torch._inductor.cabc"), LOOP), 0.9, 1.0, False),
        ((BACKWARD, Spot(f"{SITE}accelerate/accelerator.py", 9, "backward", "accelerate"), LOOP), 0.9, 1.0, False),
    ],
)
def test_what_is_work_on_the_host(stack, gil, on_core, found):
    sampler = sampled((stack, 80), gil=gil, on_core=on_core)
    sampler.steps.merge(sampled(*MODEL).steps)
    assert kinds(CALM, sampler) == ["host_work"] * found


def test_a_library_that_runs_the_training_loop_is_none():
    """A part of its own time is work on the host, but most of it is that of operators."""
    fit = Spot(f"{SITE}lightning/trainer.py", 50, "fit", "lightning.trainer")
    assert kinds(CALM, sampled(((JSON, fit, LOOP), 60), ((BACKWARD, fit, LOOP), 90))) == []
    assert kinds(CALM, sampled(((JSON, fit, LOOP), 90), ((BACKWARD, fit, LOOP), 60))) == ["host_work"]


def test_a_logger_that_is_seldom_and_cheap_is_none():
    assert kinds(CALM, sampled(((NUMPY, WRITER, LOOP), 8), *MODEL)) == []


def test_work_on_the_host_beside_a_busy_gpu_costs_nothing():
    sampler = sampled(((NUMPY, WRITER, LOOP), 80), *MODEL)
    busy, idle = (
        evidence_over([a_slice(steps=100, wait=0.5, compute=9.5, seconds=10.0, gpu_utilization_ratio=gpu)])
        for gpu in (0.97, 0.4)
    )
    assert kinds(CALM, sampler, busy) == []
    assert kinds(CALM, sampler, idle) == ["host_work"]


# -- gradients that DDP reduces too often ------------------------------------------------------------------------------

DDP = Spot(f"{SITE}torch/nn/parallel/distributed.py", 1700, "forward", "torch.nn.parallel.distributed")


@pytest.mark.parametrize(
    ("waits", "steps", "ddp", "found"),
    [
        ({1: 20, 2: 20, 3: 20, 4: 20}, 25, DDP, True),
        ({4: 80}, 25, DDP, False),  # no_sync() is in use
        ({1: 4, 2: 4, 3: 4, 4: 68}, 25, DDP, False),  # other waits of a backward pass
        ({1: 3, 2: 3, 3: 3, 4: 3}, 25, DDP, False),  # too few
        ({1: 80}, 100, DDP, False),  # each batch has its step
        ({1: 20, 2: 20, 3: 20, 4: 20}, 25, CALL, False),
        ({1: 20, 2: 20, 3: 20, 4: 20}, 0, DDP, False),  # no step of an optimizer is seen
    ],
)
def test_reducing_the_gradients_of_each_batch_that_is_accumulated_is_found(waits, steps, ddp, found):
    sampler = sampled(((BACKWARD, LOOP), 120), ((LINEAR, ddp, LOOP), 80))
    sampler.reducing.update({batch: ms * MS for batch, ms in waits.items()})
    totals = replace(CALM.totals, batches=100, optimizer_steps=steps)
    told = findings_of(StepTime(totals), sampler, COMPUTE)
    assert [finding.kind for finding in told] == ["no_sync"] * found
    if found:
        (finding,), (advice,) = told, told[0].advice
        assert (finding.share_ratio, finding.lines[0].calls) == (0.3, "graph._engine_run_backward")
        assert "each of the 4 batches" in finding.text
        assert "model.no_sync()" in advice.action
        assert advice.predicted_low == pytest.approx(1 / 0.7, abs=0.01)
        assert advice.predicted_speedup == pytest.approx(1 / 0.625, abs=0.01)  # half of the other 15 % of these passes


# -- switches of torch -------------------------------------------------------------------------------------------------

KEPT = Spot(f"{SITE}torch/fx/traceback.py", 200, "format_stack", "torch.fx.traceback")
ADAM = Spot(f"{SITE}torch/optim/adam.py", 400, "step", "torch.optim.adam")


def test_anomaly_mode_that_was_left_on_is_told_with_the_gain_without_it():
    sampler = sampled(((KEPT, LINEAR, LOOP), 100), ((LINEAR, LOOP), 40), ((BACKWARD, LOOP), 40), ((ADAM, LOOP), 20))
    (finding,) = switch_findings([ANOMALY], sampler, COMPUTE)
    assert (finding.kind, finding.share_ratio) == ("debug_switch", 0.5)
    (advice,) = finding.advice
    assert "torch.autograd.set_detect_anomaly(False)" in advice.action
    assert (advice.predicted_low, advice.predicted_speedup) == (
        pytest.approx(1.87, abs=0.02),
        pytest.approx(3.75, abs=0.1),
    )
    (few,) = switch_findings([ANOMALY], sampled(((KEPT, LOOP), 5)), COMPUTE)
    assert (few.share_ratio, few.advice[0].predicted_speedup) == (None, None)


def test_a_switch_whose_cost_is_not_known_is_a_hint_and_no_verdict():
    debug, hint = switch_findings([DETERMINISTIC, CUDA_BLOCKING], sampled(*MODEL), COMPUTE)
    assert (debug.kind, hint.kind) == ("debug_switch", "slow_setting")
    assert debug.share_ratio is hint.share_ratio is None
    rank = RankWaits(0, 100, 0.1, 9.9, 0.0, 0.1, 0.2)
    assert judge(RunFacts([rank], findings=[hint])).kind == VerdictKind.HEALTHY
    assert judge(RunFacts([rank], findings=[hint, debug])).loss.slowed_by is debug


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_switches_are_read_as_they_are_now(monkeypatch):
    assert switches_on() == ()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.detect_anomaly(check_nan=False), torch.autograd.profiler.profile(use_kineto=False):
            assert switches_on() == (ANOMALY, PROFILER, DETERMINISTIC)
    finally:
        torch.use_deterministic_algorithms(False)
    gpu = SimpleNamespace(is_initialized=lambda: True, get_sync_debug_mode=lambda: 1)
    monkeypatch.setattr(torch, "cuda", gpu)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert switches_on() == (CUDA_BLOCKING, SYNC_DEBUG)


# -- a thread of the script's own that reads the loader ----------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_that_waits_for_the_thread_that_reads_its_loader_needs_more_workers(workers):
    """A step takes 100 ms, of which it waits 80 ms for a thread that takes 100 ms for each batch."""
    evidence = structs.replace(COMPUTE, source=None, read_by_thread=True, cores=8.0)
    if workers:
        evidence = structs.replace(evidence, workers=2, worker_cpu_ratio=0.1, fetch_seconds=0.2)
    waiting = sampled(((LOCK, QUEUE, LOOP), 80), ((LINEAR, CALL, LOOP._replace(line=22)), 20), on_core=0.1)
    (finding,) = findings_of(CALM, waiting, evidence)
    assert (finding.kind, finding.share_ratio) == ("reader_thread", pytest.approx(0.8))
    assert "80 % of each step is Queue.get at train.py:20: a wait for another thread" in finding.text
    assert [line.line for line in finding.lines] == [20]
    first = finding.advice[0]
    assert first.setting == "num_workers"
    assert int(first.value) > workers
    assert first.predicted_speedup is None or 2 < first.predicted_speedup < 6
    assert not findings_of(CALM, waiting, structs.replace(evidence, read_by_thread=False)), "no thread reads a loader"
    assert not findings_of(CALM, waiting, structs.replace(evidence, source="workers")), "its waits are seen"
    calm = sampled(((LOCK, QUEUE, LOOP), 5), ((LINEAR, CALL, LOOP._replace(line=22)), 95), on_core=0.9)
    assert not findings_of(CALM, calm, evidence), "the thread is fast enough"


# -- threads beyond the cores ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "cores", "found"),
    [
        (ThreadLoad(32, 1.9, 11.0), 2.0, "OMP_NUM_THREADS=2"),
        (ThreadLoad(8, 3.4, 3.1), 3.5, "OMP_NUM_THREADS=3"),  # a quota
        (ThreadLoad(2, 1.9, 0.2), 2.0, None),  # as many as cores
        (ThreadLoad(2, 0.5, 1.5), 2.0, None),  # others use the cores
        (ThreadLoad(5, 1.0, 0.1), 2.0, None),  # they take turns, and none waits for a core
    ],
)
def test_threads_of_the_training_process(load, cores, found):
    told = findings_of(replace(CALM, cores=cores, load=load), sampled(*MODEL), COMPUTE)
    assert [finding.advice[0].typed for finding in told] == ([found] if found else [])
    lacking = Totals(ledger_seconds={"compute": 10.0}, run_queue_delay_seconds=4.0)
    for finding in findings_of(replace(CALM, totals=lacking, cores=cores, load=load), sampled(*MODEL), COMPUTE):
        assert (finding.kind == "threads_oversubscribed", finding.share_ratio) == (bool(found), 0.4)


@pytest.mark.parametrize(
    ("loads", "found"),
    [
        ([ThreadLoad(8, 0.9, 4.0)] * 2, True),
        ([ThreadLoad(1, 0.5, 0.5)] * 4, False),  # too many workers, but none of them has threads
        ([ThreadLoad(2, 1.0, 0.1)], False),
    ],
)
def test_threads_of_workers(loads, found):
    told = findings_of(replace(CALM, cores=2.0, worker_loads=loads), sampled(*MODEL), COMPUTE)
    assert ["torch.set_num_threads(1)" in finding.advice[0].action for finding in told] == [True] * found


OTHERS = {"cores_of_others": 1.5}
WORKERS = dict(workers=4, worker_busy_ratio=0.9, worker_cpu_ratio=0.5, worker_runnable_ratio=0.5, source="workers")
FEW_FETCHES = WORKERS | dict(fetch_seconds=0.02, fetch_cpu_seconds=0.002, own_runnable_seconds=3.0, cores=2.0)

# The delay in 10 s, more of the window, threads of the process, who uses the cores, the advice, and its prediction.
LACKING = {
    "others": (3.0, OTHERS, 1, "other processes use 1.5 cores", "give this job cores of its own", 1.43),
    "a quota": (3.0, {"cores_of_others": 0.0, "throttled_ratio": 0.6}, 1, "CPU quota", "raise the CPU limit", 1.43),
    "other ranks": (
        3.0, OTHERS | {"peers": (COMPUTE.pace,)}, 1, "other processes (with 1 other rank of this job) use 1.5 cores",
        "give each rank cores of its own", 1.43,
    ),
    "its threads": (3.0, {}, 3, "its other threads use 1.2 cores", "compute with as many threads as cores", 1.43),
    "others more than its workers": (
        3.0, OTHERS | WORKERS | {"workers": 2}, 1, "other processes use 1.5 cores and its own workers use 0.9 cores",
        "give this job cores of its own", 1.43,
    ),
    "its workers, too many": (3.0, FEW_FETCHES, 1, "its own workers use 1.8 cores", "use fewer workers", 1.3),
    "its workers, all needed": (3.0, WORKERS, 1, None, None, None),
    "as on many shared machines": (1.5, OTHERS, 1, None, None, None),
    "nobody knows who": (3.0, {}, 1, None, None, None),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_a_training_thread_without_a_core(case):
    delay, window, threads, who, action, gain = LACKING[case]
    totals = Totals(ledger_seconds={"compute": 10.0}, run_queue_delay_seconds=delay)
    lacking = replace(CALM, totals=totals, cores=2.0, load=ThreadLoad(threads, 1.8, 0.5))
    told = findings_of(lacking, sampled(*MODEL), structs.replace(COMPUTE, **window))
    assert [finding.kind for finding in told] == (["cores_missing"] if who else [])
    for finding in told:
        assert finding.share_ratio == 0.3
        assert finding.text.startswith("The training thread is ready to run and has no core for 30 % of the time: ")
        assert who in finding.text
        assert finding.advice[0].action.startswith(action)
        assert finding.advice[0].predicted_speedup == pytest.approx(gain, abs=0.15)


@pytest.mark.parametrize(("share", "gain"), [(0.3, 1.43), (0.06, 1.06), (0.04, None), (0.0, None)])
def test_a_gain_that_is_not_worth_it_is_not_predicted(share, gain):
    assert gain_without(COMPUTE, share) == gain


def test_the_load_of_threads_that_want_more_cores_than_there_are(monkeypatch):
    """Eight threads of one operator; those that sleep do not count."""
    end = threading.Event()
    sleeping = threading.Thread(target=end.wait)
    sleeping.start()
    loads, before = ThreadLoads(), torch.get_num_threads()
    torch.set_num_threads(8)
    matrix = torch.randn(700, 700)
    try:
        matrix @ matrix
        here = os.getpid()
        assert loads.read([here]) == {}
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            matrix @ matrix
        (load,) = loads.read([here]).values()
    finally:
        end.set()
        sleeping.join()
        torch.set_num_threads(before)
    assert 8 <= load.active < threading.active_count() + 8
    assert load.queued > 1.0


# -- the GIL -----------------------------------------------------------------------------------------------------------


def a_thread(cpu: float, *, free: int = 20, without_gil: int = 0) -> BusyThread:
    thread = BusyThread("metrics", int(cpu * NS), NS, free, without_gil)
    for _ in range(40):
        thread.profile.add((HELPER,), StackTime(MS, MS))
    return thread


def test_a_training_thread_that_sleeps_anyway_does_not_wait_for_the_gil():
    """As in a wait for a device: it sleeps as often while the GIL is free."""
    sampler = sampled(*MODEL)
    sampler.threads.found[7] = a_thread(0.4)
    sampler.free, sampler.idle = 30, 14
    assert kinds(over_10_seconds(0.5), sampler) == []
    assert kinds(over_10_seconds(0.9), sampler) == ["gil_held"]


@pytest.mark.parametrize(
    ("thread", "blocked", "share"),
    [
        (a_thread(0.8), 0.45, 0.45),
        (a_thread(0.3), 0.6, 0.3),
        (a_thread(0.9, without_gil=19), 0.5, None),  # it computes in C
        (a_thread(0.8), 0.05, None),  # the training thread does not mind
        (a_thread(0.8), None, None),
    ],
)
def test_a_thread_that_holds_the_gil(thread, blocked, share):
    sampler = sampled(*MODEL)
    sampler.threads.found[7] = thread
    told = findings_of(over_10_seconds(blocked), sampler, COMPUTE)
    assert [finding.share_ratio for finding in told] == ([] if share is None else [pytest.approx(share)])
    for finding in told:
        assert "thread metrics" in finding.text
        assert "metrics.py:5" in finding.text
        assert finding.advice[0].predicted_speedup is None


def test_the_line_of_a_thread_is_not_the_one_in_which_it_sleeps():
    """It is seen there as well when it has slept and wants the GIL, which another thread holds."""
    thread = a_thread(0.8)
    for _ in range(60):
        thread.profile.add((LOOP,), StackTime(MS, MS))
    sampler = sampled(*MODEL)
    sampler.threads.found[7] = thread
    assert "train.py:20" in findings_of(over_10_seconds(0.5), sampler, COMPUTE)[0].text
    for _ in range(60):
        thread.resting.add((LOOP,), StackTime(MS, MS))
    for _ in range(10):  # it has just got the GIL, and does not run yet
        thread.resting.add((HELPER,), StackTime(MS, MS))
    assert "metrics.py:5" in findings_of(over_10_seconds(0.5), sampler, COMPUTE)[0].text


# -- collections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("garbage", "own_ratio", "share"),
    [
        (GarbageTotals(4.0, collections=40), 1.0, 0.4),
        (GarbageTotals(4.0, collections=3), 0.0, None),  # Python's own
        (GarbageTotals(0.1, collections=40), 1.0, None),  # cheap
        (GarbageTotals(4.0, collections=0), None, None),  # of younger objects
    ],
)
def test_collections_that_the_script_has_called_for(garbage, own_ratio, share):
    evidence = structs.replace(COMPUTE, own_collections_ratio=own_ratio)
    told = findings_of(over_10_seconds(garbage=garbage), sampled(*MODEL), evidence)
    assert [finding.share_ratio for finding in told] == ([] if share is None else [pytest.approx(share, abs=0.01)])


def test_a_collection_is_no_work_of_the_line_that_calls_for_it():
    evidence = structs.replace(COMPUTE, own_collections_ratio=1.0)
    sampler, garbage = sampled(((LOOP,), 80), *MODEL, gil=0.9), GarbageTotals(seconds=4.0, collections=40)
    assert kinds(over_10_seconds(garbage=garbage), sampler, evidence) == ["host_work", "own_gc_collect"]
    for _ in range(10):
        sampler.collecting.add((LOOP,), StackTime(MS, MS))
    assert kinds(over_10_seconds(garbage=garbage), sampler, evidence) == ["own_gc_collect"]


# -- runs --------------------------------------------------------------------------------------------------------------


def loop_in_python():
    return sum(number * number % 7 for number in range(60_000))


LOOP_LINE = loop_in_python.__code__.co_firstlineno + 1


def program():
    subprocess.run(["sleep", "0.02"], check=True)


PROGRAM_LINE = program.__code__.co_firstlineno + 1


def shell():
    os.system("sleep 0.02")  # noqa: S605, S607


SHELL_LINE = shell.__code__.co_firstlineno + 1


def collect():
    gc.collect()


COLLECT_LINE = collect.__code__.co_firstlineno + 1
MATRIX = torch.randn(200, 200)


def compute():
    for _ in range(4):
        MATRIX @ MATRIX


def follow(phase: str, info: dict) -> None:
    """Follows collections, as profilers do. Each late sample of a collection meets it, or what it calls."""
    sum(number for number in range(200))


@pytest.fixture
def found(tmp_path, monkeypatch, small_heap):
    """Takes steps beside an agent that looks often, until one is the last. Returns what it has found in them."""
    often(monkeypatch)
    monkeypatch.setattr(findings, "_EVERY_SECONDS", 1.0)

    def run(step, batches=(), *, samples: int = 1 << 60):
        agent = telemetry.start(tmp_path, port="off", interval_seconds=0.25, start_line=False, end_line=False)
        until = now_ns() + 60 * NS
        try:
            for _ in batches or DataLoader(Numbers(1 << 40), batch_size=None):
                step()
                ended = any(one.lines for one in agent.findings.newest) or agent._sampler.steps.samples > samples
                if ended or now_ns() > until:
                    break
        finally:
            telemetry.stop()
        return [one for one in agent.findings.newest if one.kind != "cores_missing"]  # the machine may be busy

    return run


@pytest.mark.parametrize(
    ("work", "kind", "line", "callbacks"),
    [
        (loop_in_python, "host_work", LOOP_LINE, []),
        (program, "host_work", PROGRAM_LINE, []),
        (shell, "host_work", SHELL_LINE, []),
        (collect, "own_gc_collect", COLLECT_LINE, []),
        (collect, "own_gc_collect", COLLECT_LINE, [follow]),
    ],
    ids=["loop", "program", "shell", "gc", "gc that others follow"],
)
def test_a_run_without_a_stall_says_what_its_steps_do(found, work, kind, line, callbacks):
    gc.callbacks.extend(callbacks)
    heap = [[number] for number in range(30_000)]
    try:
        told = found(lambda: (work(), compute()))
    finally:
        for one in callbacks:
            gc.callbacks.remove(one)
    assert [(one.kind, [hot.line for hot in one.lines[:1]]) for one in told] == [(kind, [line])]
    assert len(heap)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_switch_that_stays_on_is_found_and_one_that_was_on_for_a_moment_is_not(found):
    torch.use_deterministic_algorithms(True)
    weight, began = torch.ones(8, 8, requires_grad=True), now_ns()

    def step():
        (weight @ weight).sum().backward()
        torch.use_deterministic_algorithms(now_ns() - began < 2 * NS)

    with torch.autograd.set_detect_anomaly(True):
        told = found(step, samples=1500)
    assert [one.kind for one in told if one.kind in {"debug_switch", "slow_setting"}] == ["debug_switch"]


def test_a_loader_that_another_thread_reads_ahead_is_found(found):
    model, over = torch.nn.Linear(1, 1), threading.Event()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches: queue.Queue[torch.Tensor] = queue.Queue(2)

    def read():
        for batch in DataLoader(Numbers(1 << 40, seconds=0.02), batch_size=2):
            batches.put(batch)
            if over.is_set():
                return

    def step():
        optimizer.zero_grad()
        model(batches.get().float().view(-1, 1)).sum().backward()
        optimizer.step()

    reader = threading.Thread(target=read)
    reader.start()
    (finding,) = found(step, iter(int, 1))
    over.set()
    batches.get()
    reader.join()
    assert finding.kind == "reader_thread"
    assert finding.lines[0].calls == "Queue.get"
    assert finding.advice[0].setting == "num_workers"


def test_a_model_whose_operators_take_the_time_is_fine(found):
    assert found(compute, samples=1000) == []
