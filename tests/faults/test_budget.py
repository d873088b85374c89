"""What the agent adds to a process: a few modules, and no change to anything that the script can see."""

from __future__ import annotations

import os

import pytest

from faults.processes import (
    environment,
    log_lines,
    results,
    run_script,
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
    done = run_script(
        """
        import json, sys, threading, warnings
        import numpy, torch
        from state import state
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
        from telemetry.util import threads as own_threads
        agent = telemetry.start("run", interval_seconds=0.1, log_interval_seconds=0.1, start_line=False)
        started = state()
        while started["gc"] != before["gc"]:  # a thread of ours was at work
            started = state()
        for _ in torch.utils.data.DataLoader([1, 2, 3]):
            torch.set_rng_state(torch.get_rng_state())
        while agent.accounting.stats.steps < 3 or not agent._collectors._pollers["host"].health.up:
            agent._thread.join(0.01)
        running = {"ours": own_threads.running(), "modules": sorted(set(sys.modules) - modules),
                   "known": [t.name for t in threading.enumerate()]}
        torch.manual_seed(3)
        telemetry.stop()
        numpy_after = state()
        running["undone"] = [a is b for a, b in zip(patched(), originals)]
        running["left"] = [t.name for t in threading.enumerate()] + own_threads.running()
        running["hooks_left"] = len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)
        with open("results.json", "w") as file:
            json.dump({"before": before, "started": started, "stopped": numpy_after} | running, file)
        """,
        folder,
        env=environment(PYTHONHASHSEED="0"),
    )
    return done, results(folder)


def _differences(one: dict, other: dict, but: tuple[str, ...] = ()) -> dict:
    return {key: (one[key], other[key]) for key in one if one[key] != other[key] and key not in but}


def test_the_start_changes_nothing_that_the_script_can_see(trained):
    done, found = trained
    assert _differences(found["before"], found["started"], but=("finders", "gc callbacks")) == {}
    ours = [finder for finder in found["started"]["finders"] if finder not in found["before"]["finders"]]
    assert all("telemetry.hooks.patching.ImportWatch" in finder for finder in ours), "waits for two more modules"
    assert (done.stdout, done.stderr) == ("", "")


def test_the_stop_leaves_everything_as_it_was(trained):
    _, found = trained
    assert _differences(found["before"], found["stopped"]) == {}
    assert found["undone"] == [True, True, True]
    assert [name for name in found["left"] if name != "telemetry-nvml"] == ["MainThread"]
    assert found["hooks_left"] == 0


def test_the_threads_of_a_rank_that_serves(trained):
    _, found = trained
    ours = found["ours"]
    # The NVML thread ends by itself if there is no driver.
    assert set(ours) - {"telemetry-nvml"} == {"telemetry-agent", "telemetry-endpoint"}
    assert len(ours) == len(set(ours))
    assert found["known"] == ["MainThread"], "a script that joins all threads waits for none of ours"


def test_modules_beyond_torch(trained):
    _, found = trained
    roots = {name.split(".")[0] for name in found["modules"]}
    assert roots & set(UNWANTED) <= {"torch"}, "the loop itself may load more of torch"
    assert {"telemetry", "psutil", "msgspec"} <= roots
    assert "prometheus_client" not in roots
    assert "structlog" not in roots, "ours is not in the script's way"
    for command in ("telemetry.cli", "telemetry.report", "telemetry.demo", "telemetry.doctor", "argparse"):
        assert command not in found["modules"]


def test_modules_of_a_process_without_torch(tmp_path):
    """``telemetry run`` leaves importing torch to the script."""
    run_script(
        f"""
        import os, sys
        before = set(sys.modules)
        import telemetry
        assert {{n for n in set(sys.modules) - before if n.startswith("telemetry")}} <= {{
            "telemetry", "telemetry._version", "telemetry.api", "telemetry.config", "telemetry.util", "telemetry.hooks",
            "telemetry.util.clock", "telemetry.util.errors", "telemetry.util.threads",
            "telemetry.config", "telemetry.hooks.patching"}}
        assert len(os.listdir("/proc/self/task")) == 1
        agent = telemetry.start("run", interval_seconds=0.1, log_interval_seconds=0.1)
        list(telemetry.watch([1, 2, 3]))
        while agent.accounting.stats.steps < 3:
            agent._thread.join(0.01)
        telemetry.stop()
        loaded = {{name.split(".")[0] for name in set(sys.modules) - before}}
        assert not loaded & set({UNWANTED!r}), loaded & set({UNWANTED!r})
        """,
        tmp_path,
    )


def test_without_a_port_there_is_no_http_server(tmp_path):
    run_script(
        """
        import os, sys, telemetry
        agent = telemetry.start("run", port=None, interval_seconds=0.1)
        pid = os.fork()
        if not pid:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        list(telemetry.watch([1, 2, 3]))
        while agent.accounting.stats.steps < 3:
            agent._thread.join(0.01)
        telemetry.stop()
        assert not {"http.server", "prometheus_client"} & set(sys.modules)
        """,
        tmp_path,
    )


def test_packages_that_structlog_would_load_stay_out(tmp_path):
    for name in ("rich", "twisted", "better_exceptions"):
        write(tmp_path, f"site/{name}/__init__.py", "import os\nopen('loaded-' + __name__, 'w').close()\n")
    for name in ("console", "traceback", "pretty"):
        write(tmp_path, f"site/rich/{name}.py", "class Console: pass\nclass Traceback: pass\ndef install(): pass\n")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), env["PYTHONPATH"]])
    done = run_script(
        """
        import os, sys, threading, telemetry
        agent = telemetry.start("run", start_line=False, interval_seconds=0.1, log_interval_seconds=0.1)
        before = agent.event_log.log.file._size
        while agent.event_log.log.file._size == before:
            agent._thread.join(0.01)
        heavy = ("rich", "twisted", "better_exceptions")
        assert not [name for name in sys.modules if name.split(".")[0] in heavy]
        assert not [name for name in os.listdir() if name.startswith("loaded-")]
        assert not [finder for finder in sys.meta_path if "jsonl" in type(finder).__module__]

        import rich  # nothing of ours is in the way of the script's own imports
        import structlog, structlog.dev
        assert structlog.dev.rich is rich
        assert structlog is not sys.modules.get("telemetry.agent.log").__dict__.get("structlog")
        structlog.configure(processors=[structlog.processors.JSONRenderer()])
        structlog.get_logger().info("the script's own", x=1)
        structlog.contextvars.bind_contextvars(theirs=1)
        size = agent.event_log.log.file._size
        while agent.event_log.log.file._size == size:
            agent._thread.join(0.01)
        telemetry.stop()
        """,
        tmp_path,
        env=env,
    )
    assert done.stdout == '{"x": 1, "event": "the script\'s own"}\n', "its configuration is its own"
    assert done.stderr == ""
    lines = log_lines(tmp_path / "run")
    assert not [line for line in lines if "theirs" in line or "x" in line]
    assert lines[-1]["event"] == "run_end"


def test_a_structlog_that_the_script_has_set_up_is_left_as_it_is(tmp_path):
    done = run_script(
        """
        import structlog, telemetry
        structlog.configure(processors=[structlog.processors.KeyValueRenderer()], cache_logger_on_first_use=True)
        before = structlog.get_config()
        agent = telemetry.start("run", start_line=False)
        assert structlog.get_config() == before
        structlog.get_logger().info("theirs")
        telemetry.stop()
        assert structlog.get_config() == before
        """,
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("event='theirs'\n", "")
    assert [line["event"] for line in log_lines(tmp_path / "run")][-1] == "run_end"


def test_the_script_s_own_prometheus_client_keeps_its_registry(tmp_path):
    run_script(
        """
        import telemetry
        agent = telemetry.start("run", start_line=False)
        import prometheus_client
        mine = prometheus_client.Counter("training_steps", "A metric of the script's, of the same name.")
        mine.inc()
        text = prometheus_client.generate_latest().decode()
        assert "training_steps_total 1.0" in text
        assert "telemetry_" not in text and "training_time" not in text
        telemetry.stop()
        """,
        tmp_path,
    )


def test_a_thread_that_imports_meanwhile_gets_the_real_thing(tmp_path):
    """Another thread imports rich while the agent imports structlog without rich."""
    write(tmp_path, "site/rich/__init__.py", "")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), env["PYTHONPATH"]])
    run_script(
        """
        import builtins, threading, telemetry
        errors, done = [], threading.Event()
        def theirs():
            try:
                import rich
            except ImportError as error:
                errors.append(error)
            done.set()
        real = builtins.__import__
        def spying(name, *arguments, **named):
            if name == "rich" and not done.is_set() and threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=theirs)
                thread.start()
                thread.join()
            return real(name, *arguments, **named)
        builtins.__import__ = spying
        telemetry.start("run", start_line=False)
        builtins.__import__ = real
        assert done.is_set(), "structlog does not ask for rich any more"
        assert not errors, errors
        """,
        tmp_path,
        env=env,
    )
