"""A script ends and sees the world under ``telemetry run`` as under plain Python."""

from __future__ import annotations

import os
import re
import sys

import pytest

from faults.processes import (
    RUN,
    environment,
    events,
    log_lines,
    python,
    results,
    without_start_line,
    write,
)

ENDINGS = {
    "return": "print('done')",
    "nothing": "",
    "exit-0": "import sys; sys.exit()",
    "exit-3": "import sys; print('out'); sys.exit(3)",
    "exit-text": "import sys; sys.exit('a message')",
    "exit-none-int": "raise SystemExit(None)",
    "exit-tuple": "raise SystemExit((1, 2))",
    "exit-in-thread": """
        import sys, threading
        thread = threading.Thread(target=sys.exit, args=(4,))
        thread.start(); thread.join()
        print('main goes on')
        """,
    "error": "def inner():\n    return 1 / 0\n\ninner()",
    "error-chained": """
        def inner():
            try:
                {}["missing"]
            except KeyError as error:
                raise RuntimeError("outer") from error
        try:
            inner()
        except RuntimeError:
            raise ValueError("context")
        """,
    "error-group": """
        import sys
        if sys.version_info >= (3, 11):
            try:
                raise TypeError("one")
            except TypeError as error:
                raise ExceptionGroup("several", [error, ValueError("two")])
        """,
    "error-in-an-import": "import broken",
    "error-own-base": "class Odd(BaseException): pass\nraise Odd('odd')",
    "error-recursion": "import sys\nsys.setrecursionlimit(120)\ndef f(): f()\nf()",
    "error-unprintable": """
        class Bad(Exception):
            def __str__(self): raise ValueError
        raise Bad
        """,
    "error-own-hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("mine:", kind.__name__, error, trace.tb_lineno)
        raise ValueError("x")
        """,
    "error-surrogate": "raise ValueError('\\udcff and \\u20ac')",
    "error-in-thread": """
        import threading
        def broken(): raise ValueError("in a thread")
        thread = threading.Thread(target=broken, name="T"); thread.start(); thread.join()
        """,
    "syntax-error": "x = 1\ny = (\nz = 2\n",
    "indentation-error": "def f():\nreturn 1\n",
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nfor _ in range(10**9): pass",
    "interrupt-raised": "raise KeyboardInterrupt",
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
    "daemon-thread": """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("main ends")
        """,
    "closed-streams": "import sys\nsys.stdout.close(); sys.stderr.close(); sys.exit(5)",
    "changed-folder": "import os\nos.chdir('/')\ndef f():\n    raise ValueError('the source is still found')\nf()",
    "coding": "# -*- coding: latin-1 -*-\nprint(ascii('\\xe9'))",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_does_without_us(ending, tmp_path):
    write(tmp_path, "broken.py", "import nothing_of_that_name\n")
    write(tmp_path, "sub/script.py", ENDINGS[ending])
    plain = python("sub/script.py", cwd=tmp_path)
    ours = python(*RUN, "sub/script.py", cwd=tmp_path)

    stderr, start_lines = without_start_line(ours.stderr)
    varies = re.compile(r"repeated \d+ more times| at 0x[0-9a-f]+")  # telemetry adds a few frames to the recursion
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert varies.sub("", stderr) == varies.sub("", plain.stderr)
    assert start_lines == (0 if ending in {"syntax-error", "indentation-error"} else 1)
    if start_lines:
        ended_by_force = ending in {"interrupt-default", "terminate", "kill", "_exit", "abort"}
        assert bool(events(tmp_path / "run", "run_end")) is not ended_by_force
        assert log_lines(tmp_path / "run")[0]["event"] == "run_start"
    else:
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["./script.py", "sub/../script.py", "{}/script.py", "link.py", "sub/../link.py"])
def test_the_paths_in_a_traceback_are_python_s(place, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path, "elsewhere/target.py", "import sys\nprint(sys.path[0], sys.argv, __file__)\n1 / 0\n")
    (tmp_path / "script.py").write_text((tmp_path / "elsewhere/target.py").read_text())
    (tmp_path / "link.py").symlink_to(tmp_path / "elsewhere" / "target.py")
    place = place.format(tmp_path)
    plain = python(place, cwd=tmp_path)
    ours = python(*RUN, place, cwd=tmp_path)
    assert plain.returncode == 1
    assert (ours.stdout, without_start_line(ours.stderr)[0]) == (plain.stdout, plain.stderr)


def test_a_start_line_that_is_turned_off_leaves_stderr_empty(tmp_path):
    write(tmp_path, "script.py", "print('out')")
    done = python(*RUN, "--start-line", "off", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "")
    assert events(tmp_path / "run", "run_end")


def test_only_the_first_rank_of_a_node_says_a_line(tmp_path):
    write(tmp_path, "script.py", "")
    env = environment(RANK="5", LOCAL_RANK="1", WORLD_SIZE="8")
    assert python(*RUN, "script.py", cwd=tmp_path, env=env).stderr == ""


# -- the world as the script sees it -----------------------------------------------------------------------------

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


def _worlds(tmp_path, arguments, *, options=(), env=None):
    """What the program sees under plain Python and under ``telemetry run``."""
    seen = []
    for prefix in ((), RUN):
        done = python(*options, *prefix, *arguments, cwd=tmp_path, env=env, stdin="line 1\nline 2")
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        seen.append(results(tmp_path))
    return seen


DASHES = ("--lr", "0.1", "-x", "--", "--run-dir", "other", "-m", "-h", "--port=1", "a b", "")


@pytest.mark.parametrize("script", ["script.py", "sub/script.py", "./script.py"])
def test_a_script_sees_the_world_as_under_python(script, tmp_path):
    write(tmp_path, script, WORLD)
    plain, ours = _worlds(tmp_path, (script, *DASHES))
    assert ours == plain
    assert ours["argv"] == [script, *DASHES]
    assert ours["stdin"] == "line 1\nline 2"


@pytest.mark.parametrize("module", ["package.module", "package", "module"])
def test_a_module_sees_the_world_as_under_python(module, tmp_path):
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/module.py", WORLD)
    write(tmp_path, "package/__main__.py", WORLD)
    write(tmp_path, "module.py", WORLD)
    plain, ours = _worlds(tmp_path, ("-m", module, *DASHES))
    assert ours == plain
    assert ours["argv"][1:] == list(DASHES)


@pytest.mark.parametrize("option", ["-O", "-I", "-P", "-B"])
def test_options_of_python_hold_for_the_script(option, tmp_path):
    if option == "-P" and sys.version_info < (3, 11):
        pytest.skip("Python 3.11 brought -P")
    write(tmp_path, "sub/script.py", WORLD)
    if option == "-I":  # it also ignores PYTHONPATH, so telemetry must be installed
        start = f"import sys; sys.path.append({environment()['PYTHONPATH'].split(os.pathsep)[0]!r}); "
        start += "from telemetry.cli import main; main(['run', '--run-dir', 'run', 'sub/script.py'])"
        done = python("-I", "-c", start, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert str(tmp_path / "sub") not in results(tmp_path)["path"]
        return
    plain, ours = _worlds(tmp_path, ("sub/script.py",), options=(option,))
    assert ours == plain


def test_a_module_s_exception_is_told_without_our_frames(tmp_path):
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/module.py", "import sys\ndef f():\n    raise ValueError(sys.argv)\nf()\n")
    plain = python("-m", "package.module", "-v", cwd=tmp_path)
    ours = python(*RUN, "-m", "package.module", "-v", cwd=tmp_path)
    told = without_start_line(ours.stderr)[0]
    runpy = re.compile(r'  File "(<frozen runpy>".*|.*/runpy\.py".*\n    .*)\n')  # frozen from Python 3.11 on
    assert told == runpy.sub("", plain.stderr)
    assert ours.returncode == plain.returncode == 1


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


def test_classes_of_main_can_be_pickled_and_spawned(tmp_path):
    source = """
        import json, multiprocessing, os, pickle, sys
        class Thing:
            def __init__(self, value): self.value = value
        def work(thing, queue):
            threads = []
            for task in os.listdir("/proc/self/task"):
                with open(f"/proc/self/task/{task}/comm") as comm:
                    threads.append(comm.read())
            ours = [name for name in sys.modules if name.split(".")[0] == "telemetry"]
            queue.put((Thing(thing.value + 1), ours, threads))
        if __name__ == "__main__":
            os.chdir("/")
            assert pickle.loads(pickle.dumps(Thing(1))).value == 1
            found = {}
            for method in ("spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=work, args=(Thing(1), queue))
                process.start()
                thing, ours, threads = queue.get(timeout=60)
                process.join()
                found[method] = [type(thing).__name__, thing.value, ours, threads, process.exitcode]
            with open(sys.argv[1], "w") as file:
                json.dump(found, file)
        """
    write(tmp_path, "sub/script.py", source)
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/module.py", source)
    for target in (("sub/script.py",), ("-m", "package.module")):
        done = python(*RUN, *target, tmp_path / "results.json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert without_start_line(done.stderr) == ("", 1)
        for _kind, (name, value, ours, threads, code) in results(tmp_path).items():
            assert (name, value, ours, code) == ("Thing", 2, [], 0)
            assert not [thread for thread in threads if "telemetry" in thread]
    assert len({line["pid"] for line in log_lines(tmp_path / "run")}) == 2, "one process of each run has a log"
