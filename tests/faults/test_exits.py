"""A script ends and sees the world under ``telemetry run`` as under plain Python, whatever happens to the agent."""

from __future__ import annotations

import json
import re
import socket
import sys

import pytest

from tests.faults.processes import (
    HANG,
    RUN,
    START_LINE,
    Child,
    both,
    end_of,
    environment,
    events,
    log_lines,
    python,
    quiet,
    run,
    with_driver,
    without_start_line,
    write,
)

END_LINE = re.compile(r"^telemetry: (?!run ).*; see: telemetry report .*\n", re.MULTILINE)


def with_end_line(**variables: str) -> dict[str, str]:
    env = environment(**variables)
    del env["TELEMETRY_END_LINE"]
    return env


# -- how it ends ---------------------------------------------------------------------------------------------------

TRAINS = "import telemetry; [*telemetry.watch(range(20))]\n"  # so that the agent has something to say at the end

ENDINGS = {
    "return": "print('done')",
    "exit-0": "import sys; sys.exit()",
    "exit-3": "import sys; print('out'); sys.exit(3)",
    "exit-text": "import sys; sys.exit('a message')",
    "error-in-an-import": "import broken",
    "error-recursion": "import sys\nsys.setrecursionlimit(120)\ndef f(): f()\nf()",
    "error-own-hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("mine:", kind.__name__, error, trace.tb_lineno)
        raise ValueError("x")
        """,
    "error-in-thread": """
        import threading
        def broken(): raise ValueError("in a thread")
        thread = threading.Thread(target=broken, name="T"); thread.start(); thread.join()
        """,
    "syntax-error": "x = 1\ny = (\nz = 2\n",
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(10**9): pass",
    "interrupt-default": "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\nos.kill(os.getpid(), 2)",
    "terminate": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()",
    "terminate-handled": """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10**9): pass
        """,
    "kill": "import os\nos.kill(os.getpid(), 9)",
    "_exit": "import os\nprint('lost'); os._exit(7)",
    "abort": "import resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nimport os\nos.abort()",
    "order": """
        import atexit, sys, threading, weakref
        atexit.register(print, "registered first")
        class Object:
            def __del__(self): print("deleted")
        kept = Object()
        weakref.finalize(kept, print, "finalized")
        release = threading.Event()
        def late():
            release.wait()
            print("a non-daemon thread outlives main")
        threading.Thread(target=late).start()
        atexit.register(print, "registered last")
        threading.Timer(0.05, release.set).start()
        print("main ends")
        """,
    "atexit-fails": """
        import atexit
        def broken(): raise ValueError("in atexit")
        atexit.register(print, "the rest is run")
        atexit.register(broken)
        """,
    "closed-streams": "import sys\nsys.stdout.close(); sys.stderr.close(); sys.exit(5)",
    "no-stderr": "import sys\nsys.stderr = None",
    "forked-child": "import os, sys\nsys.stderr.flush()\nos.fork() and os.wait()",
    "changed-folder": "import os\nos.chdir('/')\ndef f():\n    raise ValueError('the source is still found')\nf()",
}

BY_FORCE = {"interrupt-default", "terminate", "kill", "_exit", "abort"}
WITHOUT_STDERR = {"closed-streams", "no-stderr"}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_does_without_us(ending, tmp_path):
    """The agent's last line comes after all that the script, or Python for it, has said."""
    write(tmp_path, "broken.py", "import nothing_of_that_name\n")
    script = write(tmp_path, "sub/script.py", ENDINGS[ending])
    script.write_text(TRAINS + script.read_text())
    bare, ours, start_lines = both(tmp_path, "sub/script.py", env=with_end_line())
    varies = re.compile(r"repeated \d+ more times| at 0x[0-9a-f]+")  # telemetry adds a few frames to the recursion
    said, rest = varies.sub("", bare.err), varies.sub("", ours.err)
    assert (ours.code, ours.out) == (bare.code, bare.out)
    assert rest.startswith(said)
    begun = ending != "syntax-error"
    line = rest.removeprefix(said)
    assert bool(END_LINE.fullmatch(line)) is (begun and ending not in BY_FORCE | WITHOUT_STDERR), line
    assert END_LINE.fullmatch(line) or line == ""
    assert start_lines == begun
    if begun:
        assert bool(events(tmp_path / "run", "run_end")) is (ending not in BY_FORCE)
        assert log_lines(tmp_path / "run")[0]["event"] == "run_start"
    else:
        assert not (tmp_path / "run").exists()


LOADER = """
    import sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from tests.quick_optimizers import QuickSGD

    if __name__ == "__main__":
        model = torch.nn.Linear(4, 4)
        optimizer = QuickSGD(model.parameters(), lr=0.1)
        for batch, in DataLoader(TensorDataset(torch.zeros(40, 4)), batch_size=2, num_workers=2):
            model(batch).sum().backward()
            optimizer.step()
        sys.stderr.write("the loop is over\\n")
        raise ValueError("x")
"""


def test_the_last_line_of_a_process_with_torch_and_workers(tmp_path):
    """The agent asks to be told of the exit before torch is imported. The workers write no line of theirs."""
    done = python(*RUN, write(tmp_path, "script.py", LOADER), cwd=tmp_path, env=with_end_line())
    start, over, *traceback, error, line = done.stderr.splitlines()
    assert (done.returncode, over, error) == (1, "the loop is over", "ValueError: x")
    assert START_LINE.fullmatch(start + "\n")
    assert END_LINE.fullmatch(line + "\n")
    assert traceback[0] == "Traceback (most recent call last):"


SHADOWS = """\
import atexit, sys
atexit.register(lambda: print({'bokeh', 'jinja2', 'numpy'} & {*sys.modules}))
with open("telemetry.py", "w") as file:
    file.write("raise ImportError('of the script')")
"""
PAGES = {"exit-3": 3, "terminate-handled": 143, "error-in-an-import": 1, "forked-child": 0}


@pytest.mark.parametrize("ending", PAGES)
def test_the_page_is_written_once_by_another_process_and_the_status_stays(ending, tmp_path):
    """Modules of the same names in the working folder are not taken."""
    pytest.importorskip("bokeh")
    write(tmp_path, "bokeh.py", "raise ImportError('of the script')\n")
    script = write(tmp_path, "sub/script.py", ENDINGS[ending])
    script.write_text(SHADOWS + script.read_text())
    done = python(*RUN, "--html", "a page.html", script, cwd=tmp_path, env=quiet())
    assert (done.returncode, done.stdout.count("set()\n")) == (PAGES[ending], 2 if ending == "forked-child" else 1)
    assert done.stderr.endswith(f"telemetry: the page of the run is {tmp_path}/a page.html\n")
    assert done.stderr.count("the page of the run is") == 1
    assert (tmp_path / "a page.html").read_text().startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    script = write(tmp_path, "script.py", "print('out')")
    done = python(*RUN, "--html", "missing/page.html", script, cwd=tmp_path, env=quiet())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "out\n", 1)
    assert done.stderr.startswith(f"telemetry: the page cannot be written to {tmp_path}/missing/page.html: ")
    missing = python("-c", "import sys; sys.modules['bokeh'] = None; from telemetry.cli import main; "
                     "sys.exit(main(['run', '--html', 'x', 'script.py']))", cwd=tmp_path, env=quiet())  # fmt: skip
    told = "telemetry: --html needs bokeh: pip install 'torch-telemetry[html]'\n"
    assert (missing.returncode, missing.stdout, missing.stderr) == (2, "", told)


@pytest.mark.parametrize("place", ["./script.py", "sub/../script.py", "{}/script.py", "link.py", "sub/../link.py"])
def test_the_paths_in_a_traceback_are_python_s(place, tmp_path):
    (tmp_path / "sub").mkdir()
    target = write(tmp_path, "elsewhere/target.py", "import sys\nprint(sys.path[0], sys.argv, __file__)\n1 / 0\n")
    (tmp_path / "script.py").write_text(target.read_text())
    (tmp_path / "link.py").symlink_to(target)
    bare, ours, _ = both(tmp_path, place.format(tmp_path))
    assert bare.code == 1
    assert ours == bare


def test_the_start_line_can_be_turned_off_and_only_the_first_rank_of_a_node_says_it(tmp_path):
    run(tmp_path, "print('out')", under=(*RUN, "--start-line", "off"), env=environment(), out="out\n")
    assert events(tmp_path / "run", "run_end")
    run(tmp_path, "", under=RUN, env=environment(RANK="5", LOCAL_RANK="1", WORLD_SIZE="8"))


# -- the world as the script sees it -------------------------------------------------------------------------------

WORLD = '''
"""A docstring."""
import __main__, builtins, inspect, json, os, sys
spec = __spec__ and [__spec__.name, __spec__.origin, __spec__.parent, type(__spec__.loader).__name__]
x: int = 1
names = sorted(name for name in globals() if name.startswith("__"))
world = {
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "doc": __doc__, "package": __package__,
    "spec": spec, "loader": [type(__loader__).__name__, __loader__.name, __loader__.path],
    "builtins": __builtins__ is builtins, "cached": __cached__, "names": names, "folder": os.getcwd(),
    "main": __main__.__dict__ is globals(), "main_module": sys.modules["__main__"] is __main__,
    "annotations": str(__main__.__annotations__), "stdin": sys.stdin.read(), "flags": str(sys.flags),
    "source": inspect.getsource(sys.modules["__main__"])[:20], "interactive": hasattr(sys, "ps1"),
    "recursion": sys.getrecursionlimit(), "switch": sys.getswitchinterval(), "dont_write": sys.dont_write_bytecode,
    "hook": sys.excepthook is sys.__excepthook__, "display": sys.displayhook is sys.__displayhook__,
    "optimized": not __debug__,
}
with open("results.json", "w") as file:
    json.dump(world, file)
'''

DEPTH = """
import sys
frame, below = sys._getframe(), -1
while frame is not None:
    frame, below = frame.f_back, below + 1
print(below)
"""


def test_few_frames_are_below_the_script(tmp_path):
    """Code that walks the stack in each operator, as autograd's anomaly mode does, pays for each of them."""
    write(tmp_path, "script.py", DEPTH)
    command = ("-c", "import sys; from telemetry.__main__ import main; sys.exit(main())", *RUN[2:])
    for under, frames in ((RUN, 3), (command, 2)):
        done = python(*under, "script.py", cwd=tmp_path, env=quiet())
        assert (done.returncode, done.stdout) == (0, f"{frames}\n"), done.stderr


DASHES = ("--lr", "0.1", "-x", "--", "--run-dir", "other", "-m", "-h", "--port=1", "a b", "")


def worlds(tmp_path, arguments, *, options=()):
    """What the program sees under plain Python and under ``telemetry run``."""
    seen = []
    for under in ((), RUN):
        done = python(*options, *under, *arguments, cwd=tmp_path, stdin="line 1\nline 2")
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        seen.append(json.loads((tmp_path / "results.json").read_text()))
    return seen


@pytest.mark.parametrize("script", ["sub/script.py", "./script.py"])
def test_a_script_sees_the_world_as_under_python(script, tmp_path):
    write(tmp_path, script, WORLD)
    options = ("-O", "-B", *(("-P",) if sys.version_info >= (3, 11) else ())) if script.startswith("sub") else ()
    bare, ours = worlds(tmp_path, (script, *DASHES), options=options)
    assert ours == bare
    assert ours["argv"] == [script, *DASHES]
    assert ours["stdin"] == "line 1\nline 2"


@pytest.mark.parametrize("module", ["package.module", "package"])
def test_a_module_sees_the_world_as_under_python(module, tmp_path):
    write(tmp_path, "package/__init__.py", "")
    for name in ("package/module.py", "package/__main__.py"):
        write(tmp_path, name, WORLD)
    bare, ours = worlds(tmp_path, ("-m", module, *DASHES))
    assert ours == bare
    assert ours["argv"][1:] == list(DASHES)


def test_what_cannot_be_run_is_said_in_a_line(tmp_path):
    write(tmp_path, "zero.py", "x = 1\0")
    write(tmp_path, "package/__init__.py", "")
    (tmp_path / "script.pyc").write_bytes(b"\0\0\0\0")
    (tmp_path / "folder").mkdir()
    for arguments in (["nowhere.py"], ["folder"], ["script.pyc"], ["-m", "nowhere"], ["-m", "package"], ["-m", "a..b"]):
        done = python(*RUN, *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert re.fullmatch(r"telemetry: .+\n", done.stderr), done.stderr
    zero = python(*RUN, "zero.py", cwd=tmp_path)
    assert zero.returncode != 0
    assert "Traceback" not in zero.stderr
    assert not (tmp_path / "run").exists()


SPAWNING = """
    import multiprocessing, os, pickle, sys
    class Thing:
        def __init__(self, value): self.value = value
    def work(thing, queue):
        threads = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
        ours = [name for name in sys.modules if name.split(".")[0] == "telemetry"]
        queue.put((Thing(thing.value + 1), ours, [name for name in threads if "telemetry" in name]))
    if __name__ == "__main__":
        os.chdir("/")
        assert pickle.loads(pickle.dumps(Thing(1))).value == 1
        for method in ("spawn", "forkserver"):
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            process = context.Process(target=work, args=(Thing(1), queue))
            process.start()
            thing, ours, threads = queue.get(timeout=60)
            process.join()
            print(method, type(thing).__name__, thing.value, ours, threads, process.exitcode)
"""


def test_classes_of_main_can_be_pickled_and_spawned(tmp_path):
    write(tmp_path, "sub/script.py", SPAWNING)
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/module.py", SPAWNING)
    for target in (("sub/script.py",), ("-m", "package.module")):
        done = python(*RUN, *target, cwd=tmp_path)
        assert done.stdout == "spawn Thing 2 [] [] 0\nforkserver Thing 2 [] [] 0\n", done.stderr
        assert without_start_line(done.stderr) == ("", 1)
    assert len({line["pid"] for line in log_lines(tmp_path / "run")}) == 2, "one process of each run has a log"


# -- the exit waits for nobody -------------------------------------------------------------------------------------


def test_the_exit_does_not_wait_for_clients_of_the_endpoint(tmp_path):
    source = "import sys, telemetry\nprint(telemetry.start('run').metrics_url, flush=True)\nsys.stdin.readline()"
    with Child(write(tmp_path, "script.py", source), cwd=tmp_path, env=quiet()) as child:
        port = int(child.line().split(":")[2].split("/")[0])
        clients = [socket.create_connection(("127.0.0.1", port), timeout=HANG) for _ in range(4)]
        clients[1].sendall(b"GET /metrics HT")
        clients[2].sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n")
        clients[3].sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        child.tell()
        child.ends()
        for client in clients:
            client.close()
    assert end_of(tmp_path / "run")


def test_the_exit_does_not_wait_for_a_driver_that_hangs(tmp_path):
    source = """
        import sys, telemetry
        from tests.faults.inside import until
        telemetry.start("run")
        import fakes.nvml, pynvml
        until(lambda: pynvml.nvmlLib.state.calls["nvmlInitWithFlags"])
        sys.exit(6)
        """
    run(tmp_path, source, env=with_driver(tmp_path, hang=("nvmlInitWithFlags",)), code=6)
    assert end_of(tmp_path / "run")


# -- the start and the stop ----------------------------------------------------------------------------------------


def test_stop_and_start_again_within_a_script(tmp_path):
    source = """
        import telemetry
        from tests.faults.inside import own_threads
        telemetry.stop()
        for _ in range(3):
            telemetry.start("run")
            assert telemetry.start("elsewhere") is telemetry.start()
            telemetry.stop()
            telemetry.stop()
            assert own_threads() == []
        """
    run(tmp_path, source)
    assert len(events(tmp_path / "run", "run_end")) == 3
    assert not (tmp_path / "elsewhere").exists()


def test_an_agent_that_cannot_start_is_undone(tmp_path):
    source = """
        import os, sys, telemetry, telemetry.agent.agent
        from telemetry.node.board import Board
        from telemetry.safety import threads
        from telemetry.util.identity import identify
        from tests.faults.inside import own_threads
        start = threads.start_new_thread
        def refuse(main, arguments):
            if main.__self__.name == "telemetry-agent":
                raise RuntimeError("can't start new thread")
            return start(main, arguments)
        threads.start_new_thread = refuse
        finders = list(sys.meta_path)
        agent = telemetry.start("run", run="r")
        assert agent.running is False and agent.metrics_url is None
        assert own_threads() == []
        assert sys.meta_path == finders
        assert not Board("r", os.path.abspath("run"), identify("r", None).node).states()
        with telemetry.phase("x"), telemetry.step():
            pass
        threads.start_new_thread = start
        assert telemetry.start("run").running
        """
    said = "telemetry: cannot start (RuntimeError: can't start new thread); the run goes on without it\n"
    run(tmp_path, source, err=said)
