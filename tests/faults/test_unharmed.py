"""Scripts that must print the same, and end the same, with and without the agent.

Each prints what it has seen: which exceptions of its signal handlers, on which threads its finalizers ran, what
Dynamo counted, which line a warning named.
"""

from __future__ import annotations

import re
import signal

import pytest

from faults.processes import RUN, environment, python, write

_STAMP = re.compile(r"^W\d{4} [\d:.]+ +\d+ ", re.MULTILINE)
"""What torch writes before its warnings: the time, and the process."""

SIGNALS = """
    import ctypes, gc, random, signal, sys, threading, time
    from torch.utils.data import DataLoader

    class Preempted(Exception): pass
    class OnTime(TimeoutError): pass

    def handler(signum, frame):
        raise random.choice([Preempted, OnTime])
    signal.signal(signal.SIGALRM, handler)

    class Cycle:
        def __init__(self): self.me = self

    loader = DataLoader(range(1000), batch_size=1)

    def collections():
        [Cycle() for _ in range(100)]
        gc.collect()

    def iterators():
        it = iter(loader)
        next(it), next(it)
        del it

    def batches():
        for _ in loader: pass

    def throw():
        time.sleep(random.random() * 0.003)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Preempted))

    random.seed(1)
    main = ctypes.c_ulong(threading.get_ident())
    for work, times in ((collections, 20), (iterators, 300), (batches, 100)):
        for thrown in (False, True):
            seen = 0
            for _ in range(times):
                deadline = time.monotonic() + 1
                try:
                    if thrown:
                        threading.Thread(target=throw).start()
                    else:
                        signal.setitimer(signal.ITIMER_REAL, 0.0001 + random.random() * 0.003)
                    while time.monotonic() < deadline:
                        work()
                except (Preempted, OnTime):
                    seen += 1
            print(work.__name__, thrown, seen)
"""

THREADS = """
    import gc, os, sqlite3, threading, time
    from torch.utils.data import DataLoader

    elsewhere = 0

    class Owner:
        def __init__(self):
            self.me, self.thread = self, threading.get_ident()
            self.base = sqlite3.connect(":memory:")
        def __del__(self):
            global elsewhere
            elsewhere += self.thread != threading.get_ident()
            self.base.close()  # raises on any other thread than that which has opened it

    def forked():
        child = os.fork()
        if not child:
            os._exit(gc.get_threshold() != (700, 10, 10))
        return os.waitpid(child, 0)[1]

    gc.set_threshold(700, 10, 10)
    end, wrong = time.monotonic() + 6, 0
    while time.monotonic() < end:
        for number, _ in enumerate(DataLoader(range(200), batch_size=1)):
            kept = [Owner() for _ in range(3)]
            time.sleep(0.0005)
            if number % 50 == 0:
                wrong += forked()
    print("finalizers elsewhere:", elsewhere, "children with another threshold:", wrong)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
    while threading.active_count() > 1:
        time.sleep(0.01)
    print("alone", gc.get_threshold())
"""

COMPILED = """
    import re, sys, warnings
    import torch, torch._dynamo
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("always")
    shown = []
    warnings.showwarning = lambda message, category, file, line, *_: shown.append(
        re.sub(r"pid=\\d+", "", f"{category.__name__} {message}")[:90])
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=8, num_workers=int(sys.argv[1]),
                        multiprocessing_context="fork" if sys.argv[1] != "0" else None)

    @torch.compile(backend="eager")
    def epoch():
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    @torch.compile(backend="eager")
    def step(batches):
        (x,) = next(batches)
        return model(x).sum()

    @torch.compile(backend="eager", fullgraph=True)
    def whole(x):
        return model(x).sum()

    for _ in range(3):
        epoch()
        batches = iter(loader)
        for _ in range(4):
            step(batches)
        for (x,) in loader:
            whole(x)
    counters = torch._dynamo.utils.counters
    print(sorted(counters["stats"].items()), sorted(counters["recompiles"].items()))
    print(len(counters["graph_break"]), sum(counters["graph_break"].values()))
    print(*sorted(shown), sep="\\n")
"""

WARNED = """
    import warnings
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    import telemetry

    class Longer(IterableDataset):
        def __len__(self): return 2
        def __iter__(self): return iter(range(4))

    class Warning_(Dataset):
        def __len__(self): return 1
        def __getitem__(self, index):
            for level in range(1, 5):  # 5 is this file on some versions of Python, 6 what runs it
                warnings.warn(f"item {level}", stacklevel=level)
            return index

    def collate(items):
        warnings.warn("collate", stacklevel=2)
        return items

    def watched():
        yield 1
        warnings.warn("watched", stacklevel=2)

    def places(message, category, file, line, *_):
        print(file.rpartition("/")[2], line, str(message)[:40])
    warnings.showwarning = places
    warnings.simplefilter("always")
    for _ in DataLoader(Longer()): pass
    for _ in DataLoader(Longer(), num_workers=9, multiprocessing_context="fork"): break
    for _ in DataLoader(Warning_()): pass
    for _ in DataLoader([1], collate_fn=collate): pass
    for _ in telemetry.watch(watched()): pass

    class Saved:
        def __reduce__(self):
            for level in range(1, 5):
                warnings.warn(f"saved {level}", stacklevel=level)
            return int, ()
    torch.save(Saved(), "saved.pt")
"""

INTERRUPTED = """
    import gc, signal
    from torch.utils.data import DataLoader

    signal.signal(signal.SIGALRM, signal.default_int_handler)
    heap = [[] for _ in range(1_000_000)]  # a collection takes some 100 ms
    for _ in DataLoader(range(3), batch_size=1):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        gc.collect()
        for _ in range(1000): pass
    print("trained on")
"""


def both_ways(folder, source: str, *arguments: object):
    """What a script prints and how it ends: without the agent, and with it."""
    script = write(folder, "script.py", source)
    env = environment(TELEMETRY_START_LINE="off")
    return [python(*how, script, *arguments, cwd=folder, env=env) for how in ((), RUN)]


def agreed(folder, source: str, *arguments: object) -> str:
    bare, ours = both_ways(folder, source, *arguments)
    assert (ours.stdout, ours.returncode) == (bare.stdout, bare.returncode), ours.stderr
    assert _STAMP.sub("", ours.stderr) == _STAMP.sub("", bare.stderr)
    return bare.stdout


def test_each_exception_of_a_signal_handler_reaches_the_script(tmp_path):
    """Torch itself drops one in some hundred batches, in a C call that fails with another error."""
    bare, ours = ([int(line.split()[2]) for line in done.stdout.splitlines()] for done in both_ways(tmp_path, SIGNALS))
    assert ours[0] == bare[0] == 20
    assert all(with_us >= 0.97 * without for with_us, without in zip(ours, bare, strict=True)), (ours, bare)


def test_ctrl_c_in_a_collection_ends_the_run(tmp_path):
    bare, ours = both_ways(tmp_path, INTERRUPTED)
    assert bare.returncode == ours.returncode == -signal.SIGINT
    assert "trained on" not in ours.stdout


def test_our_threads_run_no_finalizers_and_are_not_joined(tmp_path):
    assert agreed(tmp_path, THREADS) == (
        "finalizers elsewhere: 0 children with another threshold: 0\nalone (700, 10, 10)\n"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_compiled_loops_are_compiled_as_without_us(tmp_path, workers):
    agreed(tmp_path, COMPILED, workers)


def test_warnings_name_the_same_lines(tmp_path):
    assert "watched" in agreed(tmp_path, WARNED)
