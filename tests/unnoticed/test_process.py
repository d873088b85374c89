"""The process belongs to the script: its settings, threads, signals, descriptors, limits, forks, and its end."""

from __future__ import annotations

import json
import os

import pytest

from tests.unnoticed.pairs import ITSELF, MODULE, pair, unchanged

# -- what a script can read of its process, at each step ---------------------------------------------------------------

STATE = """
    import builtins, faulthandler, gc, inspect, json, locale, logging, multiprocessing, os, resource, signal, socket, sys
    import threading, warnings
    import numpy, torch
    import telemetry
    from unnoticed.training import Training, looked_at

    def masks():
        with open("/proc/self/status") as file:
            return [line.split() for line in file if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]

    def state():
        os.umask(umask := os.umask(0))
        return {
            "threads": [threading.active_count(), [thread.name for thread in threading.enumerate()]],
            "tracing": [sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()],
            "collections": [gc.get_threshold(), gc.isenabled(), gc.get_debug(), gc.garbage],
            "imports": [[getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path], sys.path,
                        builtins.__import__.__module__],
            "functions of Python": [inspect.isbuiltin(each) for each in (gc.get_threshold, gc.collect, os.execv, os.fork,
                                    os._exit, builtins.print, builtins.open)],
            "warnings": [warnings.showwarning.__module__, *map(repr, warnings.filters)],
            "logging": [logging.root.handlers, logging.root.level, sorted(logging.root.manager.loggerDict),
                        logging.lastResort.level, logging.getLogRecordFactory().__name__, logging.getLoggerClass().__name__],
            "environment": [{name: os.environ[name] for name in sorted({*os.environ} - {"TELEMETRY_DISABLED", "PWD"})
                             if "RUN_DIR" not in name}, locale.setlocale(locale.LC_ALL), umask],
            "signals": [[str(signal.getsignal(each)) for each in signal.valid_signals()], signal.pthread_sigmask(0, ()),
                        [signal.getitimer(each) for each in range(3)], signal.set_wakeup_fd(-1), masks()],
            "hooks": [sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__,
                      sys.displayhook is sys.__displayhook__, sys.breakpointhook is sys.__breakpointhook__,
                      threading.excepthook is threading.__excepthook__],
            "faulthandler": faulthandler.is_enabled(),
            "children": len(multiprocessing.active_children()),
            "start method": multiprocessing.get_start_method(allow_none=True),
            "limits": [*map(resource.getrlimit, range(10)), sys.getrecursionlimit(), sys.get_int_max_str_digits(), os.nice(0),
                       sorted(os.sched_getaffinity(0)), socket.getdefaulttimeout(), threading.stack_size()],
            "numpy": [str(numpy.geterr()), str(numpy.get_printoptions())],
            "torch": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), str(torch.get_default_dtype()),
                      torch.get_num_threads(), torch.cuda.is_initialized(), torch.get_deterministic_debug_mode(),
                      torch.multiprocessing.get_sharing_strategy(), torch.get_float32_matmul_precision(),
                      torch.backends.cudnn.benchmark],
        }

    first = threading.Thread(target=int)  # it makes glibc handle a signal of its own
    first.start()
    first.join()
    training, seen = Training(), {}
    for _ in looked_at():
        for x in training.loader:
            training.step(x)
            for what, value in state().items():
                seen.setdefault(what, set()).add(repr(value))
    telemetry.stop()
    for what, value in (state() | {"callbacks after the stop": gc.callbacks, "switch": sys.getswitchinterval()}).items():
        seen.setdefault(what, set()).add(repr(value))
    multiprocessing.set_start_method("spawn")  # raises if somebody has needed the default one
    print(json.dumps({what: sorted(values) for what, values in seen.items()}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    bare, ours = pair(tmp_path_factory.mktemp("state"), STATE)
    assert (bare.code, ours.code, ours.err) == (0, 0, "")
    return json.loads(bare.out), json.loads(ours.out)


def test_a_step_sees_the_same_process_and_the_stop_leaves_it(seen):
    bare, ours = seen
    assert len(bare) == 18
    assert {what: values for what, values in ours.items() if values != bare[what]} == {}


# -- scripts that change their process, or end it ----------------------------------------------------------------------

CASES = {
    "a threshold of collections that is saved and restored": """
        import gc
        from gc import get_threshold
        import telemetry
        from unnoticed.training import Training, looked_at

        telemetry.start(port="off")
        training, seen = Training(), set()
        for _ in looked_at(10, bare=1):
            for x in training.loader:
                for _ in range(50):
                    saved = get_threshold()
                    seen.add(saved)
                    gc.set_threshold(*saved)
                training.step(x)
        telemetry.stop()
        print(seen, get_threshold())
        """,
    "hooks of threads are not called on ours": """
        import threading
        import telemetry
        from unnoticed.training import Training

        seen = set()
        threading.settrace(lambda *_: seen.add(threading.get_ident()))
        threading.setprofile(lambda *_: seen.add(threading.get_ident()))
        telemetry.stop()
        telemetry.start(port="off")
        thread = threading.Thread(target=Training().run)
        thread.start()
        thread.join()
        print(seen == {thread.ident})
        """,
    "an audit hook that forbids files on other threads": """
        import signal, sys, threading
        import telemetry
        from unnoticed.training import Training

        def forbid(event, arguments):
            if event == "open" and threading.get_ident() != main:
                raise PermissionError("not on this thread") if sys.argv[1:] else RuntimeError("not on this thread")

        main = threading.get_ident()
        sys.addaudithook(forbid)
        signal.alarm(4)
        telemetry.start(port="off")
        signal.alarm(0)
        for _ in range(10):
            Training().epoch()
        print("trained")
        """,
    "an audit hook that forbids to look at frames": """
        import sys
        from unnoticed.training import Training

        def forbid(event, arguments):
            if event in ("sys._getframe", "sys._current_frames"):
                raise RuntimeError(event)

        training = Training()
        training.run(1)
        sys.addaudithook(forbid)
        training.run()
        print("trained")
        """,
    "signals that raise at any moment": """
        import random, signal
        from unnoticed.training import Training, looked_at

        class Now(BaseException):
            pass

        def handle(*_):
            global raised
            raised += 1
            raise Now

        raised = caught = 0
        random.seed(1)
        training = Training()
        signal.signal(signal.SIGALRM, handle)
        for _ in looked_at(5, bare=20):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + random.random() / 500)
                while True:
                    training.epoch()
            except Now:
                caught += 1
        print(raised == caught > 0)
        """,
    "Ctrl-C is always a KeyboardInterrupt of the script": """
        import os, signal
        from unnoticed.training import Training

        training, caught = Training(workers=1), []
        for place in range(16):
            try:
                for number, x in enumerate(training.loader):
                    if number == place:
                        os.kill(os.getpid(), signal.SIGINT)
                    training.step(x)
            except KeyboardInterrupt:
                caught.append(number)
        print(caught)
        """,
    "stop from anywhere": """
        import gc, os, signal, threading, weakref
        import torch
        import telemetry
        from unnoticed.training import Items, Training

        class Thing:
            def __reduce__(self):
                telemetry.stop()
                return int, ()

        class Own(Items):
            def __getitem__(self, index):
                if place == "data set" and index == 9:
                    telemetry.stop()
                return super().__getitem__(index)

        class Order:
            def __iter__(self):
                for index in range(64):
                    if place == "sampler" and index == 9:
                        telemetry.stop()
                    yield index

        def collate(items):
            if place == "collate":
                telemetry.stop()
            return torch.stack(items)

        def at(number):
            if number != 2:
                return
            if place == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
            elif place == "thread":
                thread = threading.Thread(target=telemetry.stop)
                thread.start()
                thread.join()
            elif place == "finalizer":
                weakref.finalize(Thing(), telemetry.stop)
            elif place == "collection":
                gc.callbacks.append(lambda *_: telemetry.stop())
                gc.collect()
                gc.callbacks.pop()
            elif place == "save":
                torch.save(Thing(), os.devnull)
            elif place == "phase":
                with telemetry.phase("mine"):
                    telemetry.stop()
            elif place == "step":
                with telemetry.step():
                    telemetry.stop()

        signal.signal(signal.SIGUSR1, lambda *_: telemetry.stop())
        for place in ("data set", "sampler", "collate", "signal", "thread", "finalizer", "collection", "save", "phase",
                      "step", "forward", "backward"):
            telemetry.start(port="off")
            training = Training(Own(), sampler=Order(), collate_fn=collate)
            if place == "forward":
                training.model.register_forward_hook(lambda *_: telemetry.stop())
            if place == "backward":
                training.model.weight.register_hook(lambda _: telemetry.stop())
            for _ in range(2):
                for number, x in enumerate(training.loader):
                    at(number)
                    training.step(x)
            print(place, gc.callbacks, threading.active_count())
        """,
    "warnings are errors": """
        import warnings
        import torch
        from unnoticed.training import Training, looked_at

        class Inner(torch.optim.Optimizer):
            def __init__(self):
                super().__init__([torch.nn.Parameter(torch.ones(1))], {"lr": 1})
                self.param_groups[0]["params"] = [torch.ones(8, requires_grad=True) * 1]  # no leaf: its gradient warns

            def step(self):
                pass

        warnings.simplefilter("error")
        training, inner = Training(), Inner()
        for _ in looked_at():
            for x in training.loader:
                training.step(x)
                inner.step()
        print("trained")
        """,
    "a coroutine that trains": """
        import asyncio, contextvars
        import torch
        from unnoticed.training import Items, Training, looked_at

        class Own(Items):
            def __getitem__(self, index):
                return torch.full((8,), variable.get())

        async def main():
            variable.set(3.0)
            for _ in looked_at():
                for x in training.loader:
                    seen.add(x.max().item())
                    training.step(x)
                    await asyncio.sleep(0)
            await asyncio.to_thread(training.epoch)
            return len(asyncio.all_tasks())

        variable, training, seen = contextvars.ContextVar("variable", default=0.0), Training(Own()), set()
        print(asyncio.run(main()), seen)
        """,
    "a fault handler of the script": """
        import faulthandler, os, signal, tempfile
        from unnoticed.training import Training

        file = tempfile.TemporaryFile("w+")
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        Training().run()
        os.kill(os.getpid(), signal.SIGUSR1)
        file.seek(0)
        print(faulthandler.is_enabled(), [line for line in file if "script.py" in line])
        """,
    "other interpreters": """
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        from unnoticed.training import Training

        Training().run(2)
        for _ in range(3):
            one = interpreters.create()
            interpreters.run_string(one, "import gc, threading; print(threading.active_count(), gc.callbacks, flush=True)")
            interpreters.destroy(one)
        """,
    "forked children, however they end": """
        import os, sys
        from unnoticed.training import Training

        training = Training()
        training.run(1)
        for end in ("os._exit(4)", "sys.exit(5)", "training.epoch()", "os.kill(os.getpid(), 9)", "Training(workers=1).epoch()"):
            pid = os.fork()
            if pid == 0:
                exec(end)
                sys.exit(6)
            print(end, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        training.run(1)
        """,
    "a fork in a worker, and from a thread": """
        import os, threading
        from unnoticed.training import Items, Training

        def fork():
            pid = os.fork()
            if pid == 0:
                Training().epoch()
                os._exit(3)
            ends.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        class Forking(Items):
            def __getitem__(self, index):
                if index % 16 == 0:
                    fork()
                    assert ends == {3}
                return super().__getitem__(index)

        ends = set()
        Training(Forking(), workers=2).run(1, bare=1)
        for _ in range(3):
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        print(ends)
        """,
    "a daemon closes all descriptors": """
        import os, sys
        from unnoticed.training import Training

        training = Training()
        training.run(1)
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            os.dup2(write, 1)
            os.closerange(3, 256)
            files = [open(f"file-{number}", "wb", buffering=0) for number in range(60)]
            for _ in range(5):
                training.epoch()
            for number, file in enumerate(files):
                file.write(b"%d" % number)
            sys.exit(3)
        os.close(write)
        print(os.read(read, 1), os.waitstatus_to_exitcode(os.wait()[1]))
        """,
    "files get the number of the memory of workers": """
        import gc, os, threading
        import telemetry
        from unnoticed.training import Training

        telemetry.start(port="off", interval_seconds=30, stall_window_seconds=30)  # a tick would free that memory before
        Training(workers=1).epoch()
        while threading.active_count() > 1:  # one of torch's closes a queue
            pass
        os.closerange(3, 256)
        files = [open(f"file-{number}", "wb", buffering=0) for number in range(60)]
        Training().epoch()
        telemetry.stop()
        gc.collect()
        for number, file in enumerate(files):
            file.write(b"%d" % number)
        print(all(os.readlink(f"/proc/self/fd/{file.fileno()}") == os.path.abspath(file.name) for file in files))
        """,
    "iterations that are left keep no descriptors": """
        import os
        import telemetry
        from unnoticed.training import Training

        telemetry.start(port="off", interval_seconds=30, stall_window_seconds=30)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(12):
            for x in Training(workers=1).loader:
                break
        print(len(os.listdir("/proc/self/fd")) - before < 12)
        """,
    "no descriptor is left": """
        import os, resource
        from unnoticed.training import Training, looked_at

        training, numbers, files = Training(), looked_at(), []
        next(numbers)  # before there is no descriptor to look with
        training.epoch()
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 64))
        try:
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            print(error.errno)
        for _ in range(20):  # six ticks
            training.epoch()
        for file in files:
            os.close(file)
        for _ in numbers:
            training.epoch()
        """,
    "no memory is left for another thread": """
        import resource
        import telemetry
        from unnoticed.training import Training

        training = Training()
        training.run(1)
        with open("/proc/self/statm") as file:
            size = 4096 * int(file.read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))
        training.run()
        telemetry.stop()
        training.epoch()
        print("trained")
        """,
    "no thread may be started, and no file written": """
        import os, resource
        import telemetry
        from unnoticed.training import Training

        training = Training()
        training.run(1)
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        for _ in range(20):
            training.epoch()
        telemetry.stop()
        print("trained")
        """,
    "a folder that is gone, and files that nobody may read": """
        import os
        from unnoticed.training import Training

        os.umask(0o777)
        os.mkdir("gone", 0o700)
        os.chdir("gone")
        os.rmdir("../gone")
        Training().run()
        print(oct(os.umask(0)))
        """,
    "it executes itself": """
        import os, sys
        from unnoticed.training import Training

        Training().run(1)
        print("first", flush=True)
        os.execv(sys.executable, [sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"])
        """,
    "functions at the exit": """
        import atexit, sys
        from unnoticed.training import Training

        def leave():
            print("leaving")
            sys.exit(5)

        training = Training()
        atexit.register(print, "last")
        atexit.register(training.epoch)
        atexit.register(leave)
        training.run(1)
        print("ended", flush=True)
        """,
    "os._exit at the exit": """
        import atexit, os
        from unnoticed.training import Training

        def leave():
            print("leaving", flush=True)
            os._exit(0)

        atexit.register(leave)
        Training().run(1)
        """,
}


@pytest.mark.parametrize("source", CASES.values(), ids=CASES)
def test_a_process(source, tmp_path):
    begins_itself = "telemetry.start(port" in source.partition("Training().")[0]
    soon = {"TELEMETRY_STALL_WINDOW_SECONDS": "1", "TELEMETRY_MAX_SNAPSHOTS": "0"}
    unchanged(tmp_path, source, under=ITSELF if begins_itself else MODULE, **soon)


NO_PROC = """
    import ctypes, os
    from unnoticed.training import Training

    if __name__ == "__main__":
        libc = ctypes.CDLL(None, use_errno=True)
        new_namespace, private = 0x00020000, 1 << 18 | 1 << 14
        done = [libc.unshare(new_namespace), libc.mount(b"none", b"/", None, private, None),
                libc.mount(b"none", b"/proc", b"tmpfs", 0, None)]
        print(done, os.listdir("/proc"))
        Training(workers=1).epoch()
        Training(workers=1, multiprocessing_context="spawn").epoch()
        print("trained")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="a mount namespace needs root")
def test_spawned_workers_need_no_proc(tmp_path):
    unchanged(tmp_path, NO_PROC)


COLD = {
    "generators at the exit": """
        import threading

        def numbers(name):
            try:
                yield 1
            finally:
                print("closed", name)

        class Last:
            def __del__(self):
                print("last")

        one, last = numbers("one"), Last()
        threading.Thread(target=next, args=(one,)).start()
        print("end", lambda: one)
        """,
    "strict options": """
        import telemetry
        from unnoticed.looks import looked_at

        for _ in looked_at():
            with telemetry.phase("mine"):
                for _ in telemetry.watch([1, 2]):
                    pass
        telemetry.stop()
        telemetry.start()
        print("end")
        """,
}


@pytest.mark.parametrize("source", COLD.values(), ids=COLD)
def test_a_process_from_its_start_to_its_end(source, tmp_path):
    unchanged(tmp_path, source, cold=True, options=["-X", "dev", "-W", "error"])
