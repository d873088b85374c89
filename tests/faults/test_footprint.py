"""What the agent adds to a process: a few modules and threads, and no change to anything that the script can see."""

from __future__ import annotations

import os

import pytest

from tests.faults.processes import (
    both,
    log_lines,
    quiet,
    run,
    with_driver,
    write,
)

# Everything in the process that the agent must not change, as text.
STATE = """
import builtins, faulthandler, gc, io, locale, logging, os, random, resource, signal, socket, sys, threading, warnings


def state():
    signals = {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()}
    with open("/proc/self/status") as file:
        masks = [line.split() for line in file if line.startswith(("Sig", "Shd"))]
    found = {
        "signals": signals,
        "masks": [mask for mask in masks if mask[0] in ("SigBlk:", "SigIgn:", "SigCgt:")],
        "wakeup": signal.set_wakeup_fd(-1),
        "timers": [signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)],
        "hooks": [id(hook) for hook in (
            sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook, threading.excepthook,
            sys.stdout, sys.stderr, sys.stdin, sys.stdout.write, builtins.print, builtins.open, builtins.__import__,
            os.fork, os._exit, socket.socket, threading.Thread.start, signal.signal, warnings.showwarning,
        ) if not hasattr(hook, "__self__") or hook.__self__ is builtins],
        "warnings": [repr(entry) for entry in warnings.filters],
        "locale": locale.setlocale(locale.LC_ALL),
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "umask": [umask := os.umask(0), os.umask(umask)][0],
        "random": hash(random.getstate()),
        "switch": sys.getswitchinterval(),
        "recursion": sys.getrecursionlimit(),
        "trace": [repr(sys.gettrace()), repr(sys.getprofile()), repr(threading.gettrace())],
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "gc callbacks": len(gc.callbacks),
        "faulthandler": faulthandler.is_enabled(),
        "limits": [resource.getrlimit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "timeout": socket.getdefaulttimeout(),
        "stack": threading.stack_size(),
        "logging": [logging.root.level, [repr(handler) for handler in logging.root.handlers], logging.lastResort.level,
                    logging.getLogRecordFactory().__name__, logging.raiseExceptions, logging.getLoggerClass().__name__],
        "finders": [repr(finder) for finder in sys.meta_path],
        "float": sys.float_repr_style,
        "int": sys.get_int_max_str_digits(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = [hash(numpy.random.get_state()[1].tobytes()), str(numpy.geterr()), str(numpy.get_printoptions())]
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = [
            hash(torch.get_rng_state().numpy().tobytes()), torch.get_num_threads(), torch.get_num_interop_threads(),
            torch.is_grad_enabled(), str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(),
            torch.multiprocessing.get_sharing_strategy(), torch.multiprocessing.get_start_method(allow_none=True),
            torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(), torch.cuda.is_initialized(),
        ]
    return found
"""

UNWANTED = (
    "pydantic", "rich", "textual", "pandas", "duckdb", "twisted", "sqlalchemy", "pyarrow", "matplotlib",
    "better_exceptions", "colorama", "requests", "aiohttp", "tornado", "yaml", "jinja2", "IPython", "tensorboard",
    "pytest", "setuptools", "pkg_resources", "click", "typer", "attr", "urllib3", "grpc", "opentelemetry", "numpy", "torch", "sqlite3",
    "tkinter", "unittest", "pdb", "xmlrpc",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A process with torch and numpy compares itself before the start, while the agent runs, and after the stop."""
    folder = tmp_path_factory.mktemp("trained")
    write(folder, "state.py", STATE)
    source = """
        import sys, threading, warnings
        import numpy, torch
        from state import state
        from tests.faults.inside import own_threads, steps, tell, until
        warnings.filterwarnings("error", message="a filter of the script's own")
        torch.manual_seed(3)
        first = threading.Thread(target=int)  # the first thread makes glibc handle a signal of its own
        first.start()
        first.join()
        before, modules = state(), set(sys.modules)
        patched = lambda: [torch.save, torch.utils.data.DataLoader.__iter__,
                           torch.utils.data.dataloader._BaseDataLoaderIter.__next__]
        originals = patched()
        import telemetry
        agent = telemetry.start("run", interval_seconds=0.1, log_interval_seconds=0.1, start_line=False)
        started = state()
        for _ in torch.utils.data.DataLoader([1, 2, 3]):
            torch.set_rng_state(torch.get_rng_state())
        until(lambda: steps() == 3 and '"host"' in agent.event_log.file.path.read_text())
        found = {"ours": own_threads(), "modules": sorted(set(sys.modules) - modules),
                 "known": [t.name for t in threading.enumerate()]}
        torch.manual_seed(3)
        telemetry.stop()
        found |= {"before": before, "started": started, "stopped": state()}
        found["undone"] = [a is b for a, b in zip(patched(), originals)]
        found["left"] = [t.name for t in threading.enumerate()] + own_threads()
        found["hooks_left"] = len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)
        tell(found)
        """
    return run(folder, source, env=quiet(PYTHONHASHSEED="0"))


def differences(one: dict, other: dict, but: tuple[str, ...] = ()) -> dict:
    return {key: (one[key], other[key]) for key in one if one[key] != other[key] and key not in but}


def test_the_start_changes_nothing_that_the_script_can_see_and_the_stop_undoes_all(trained):
    before, started = trained["before"], trained["started"]
    assert differences(before, started, but=("gc callbacks",)) == {}
    assert differences(before, trained["stopped"]) == {}
    assert trained["undone"] == [True, True, True]
    assert trained["left"] == ["MainThread"]
    assert trained["hooks_left"] == 1, "for the next agent: a script may stop this one while torch goes through them"


def test_the_threads_of_a_rank_that_serves(trained):
    assert trained["ours"] == ["telemetry-agent", "telemetry-endpoint"]
    assert trained["known"] == ["MainThread"], "a script that joins all threads waits for none of ours"


def test_modules_beyond_torch(trained):
    roots = {name.split(".")[0] for name in trained["modules"]}
    assert roots & set(UNWANTED) <= {"torch"}, "the loop itself may load more of torch"
    assert {"telemetry", "msgspec"} <= roots
    assert not {"prometheus_client", "structlog", "psutil"} & roots, "ours is not in the script's way"
    for command in ("telemetry.cli", "telemetry.report", "telemetry.demo", "telemetry.doctor", "argparse"):
        assert command not in trained["modules"]


@pytest.mark.parametrize("port", ["0", "off"])
def test_modules_of_a_process_without_torch(port, tmp_path):
    """``telemetry run`` leaves importing torch to the script."""
    source = f"""
        import os, sys
        from tests.faults.inside import own_threads, steps, until
        before = set(sys.modules)
        import telemetry
        first = {{name for name in set(sys.modules) - before if name.startswith("telemetry")}}
        assert not first & {{"telemetry.agent", "telemetry.node", "telemetry.sources", "telemetry.records"}}, first
        assert len(os.listdir("/proc/self/task")) == 1
        telemetry.start("run")
        assert own_threads() == ["telemetry-agent"] + ["telemetry-endpoint"] * ({port!r} == "0")
        if not (pid := os.fork()):
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        list(telemetry.watch([1, 2, 3]))
        until(lambda: steps() == 3)
        telemetry.stop()
        loaded = {{name.split(".")[0] for name in set(sys.modules) - before}}
        assert not loaded & set({UNWANTED!r}), loaded & set({UNWANTED!r})
        """
    run(tmp_path, source, env=quiet(TELEMETRY_PORT=port))


def test_structlog_and_what_it_would_load_are_the_script_s_own(tmp_path):
    for name in ("rich", "twisted", "better_exceptions"):
        write(tmp_path, f"site/{name}/__init__.py", "import os\nopen('loaded-' + __name__, 'w').close()\n")
    for name in ("console", "traceback", "pretty"):
        write(tmp_path, f"site/rich/{name}.py", "class Console: pass\nclass Traceback: pass\ndef install(): pass\n")
    source = """
        import os, sys, telemetry
        from tests.faults.inside import log_file, until
        def logs():
            size = log_file().path.stat().st_size
            until(lambda: log_file().path.stat().st_size > size)
        telemetry.start("run")
        logs()
        heavy = ("rich", "twisted", "better_exceptions")
        assert not [name for name in sys.modules if name.split(".")[0] in heavy]
        assert not [name for name in os.listdir() if name.startswith("loaded-")]

        import rich  # nothing of ours is in the way of the script's own imports
        import structlog, structlog.dev
        assert structlog.dev.rich is rich
        structlog.configure(processors=[structlog.processors.JSONRenderer()])
        before = structlog.get_config()
        structlog.get_logger().info("the script's own", x=1)
        structlog.contextvars.bind_contextvars(theirs=1)
        logs()
        telemetry.stop()
        assert structlog.get_config() == before
        """
    said = """{"x": 1, "event": "the script's own"}\n"""
    run(tmp_path, source, env=quiet(path=tmp_path / "site"), out=said)
    lines = log_lines(tmp_path / "run")
    assert not [line for line in lines if "theirs" in line or "x" in line]
    assert lines[-1]["event"] == "run_end"


# -- threads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", [True, False])
def test_the_nvml_thread_is_there_with_a_driver_only(driver, tmp_path):
    if not driver and os.path.exists("/proc/driver/nvidia"):
        pytest.skip("this machine has a driver")
    source = """
        import sys, telemetry
        from telemetry.util import threads
        from tests.faults.inside import page, until
        telemetry.start("run")
        up = 'telemetry_collector_up{collector="nvml",rank="0",run="run"} ' + sys.argv[1]
        until(lambda: up in page() and ("telemetry-nvml" in threads.running()) == (sys.argv[1] == "1.0"))
        """
    run(tmp_path, source, "1.0" if driver else "0.0", env=with_driver(tmp_path) if driver else None)


THREADS = """
    import gc, threading, time
    from torch.utils.data import DataLoader

    gc.set_threshold(700, 10, 10)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        for _ in DataLoader(range(200), batch_size=1):
            time.sleep(0.0005)
            assert gc.get_threshold() == (700, 10, 10)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
    while threading.active_count() > 1:
        time.sleep(0.01)
    print("alone")
"""


def test_our_threads_are_not_joined_and_leave_the_threshold_of_collections(tmp_path):
    bare, ours, _ = both(tmp_path, write(tmp_path, "script.py", THREADS))
    assert ours == bare
    assert bare.out == "alone\n"
