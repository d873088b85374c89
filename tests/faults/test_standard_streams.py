"""Stdin, stdout and stderr are closed, full, replaced or blocked: the script finds them as without the agent."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from faults.processes import HANG, environment, events, results, run_script, write
from telemetry.util import errors, files

RUN = ("-m", "telemetry", "run", "--run-dir", "run", "--interval-seconds", "0.1", "--log-interval-seconds", "0.1")

PRINTING = '''
"""Prints on descriptors that may be closed, trains, and says what came of it."""
import json, multiprocessing, os, subprocess, sys
import torch

def tried(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return error.errno

seen = {"streams": [sys.stdin is None, sys.stdout is None, sys.stderr is None]}
outcomes = set()
multiprocessing.set_start_method("fork")
loader = torch.utils.data.DataLoader(torch.arange(200.0), num_workers=int(sys.argv[1]))
print("python")
for _ in loader:
    for _ in range(20):
        outcomes |= {("write", n, str(tried(os.write, n, b"the script's own line\\n"))) for n in (1, 2)}
        outcomes.add(("read", 0, str(tried(os.read, 0, 1))))
seen["outcomes"] = sorted(outcomes)
child = "import os, json\\nfound = []\\nfor n in range(3):\\n"
child += "    try: os.fstat(n)\\n    except OSError as error: found.append(error.errno)\\n"
child += "open('child.json', 'w').write(json.dumps(found))"
subprocess.run([sys.executable, "-c", child], check=True)
seen["child"] = json.load(open("child.json"))
json.dump(seen, open("results.json", "w"))
'''


@pytest.fixture(scope="module")
def zero_stays_free():
    """Libffi of Debian's testing suite keeps its own file open, with the number of stdin if that is closed."""
    import_torch = [sys.executable, "-c", "import os; os.close(0); import torch; os.fstat(0)"]
    if subprocess.run(import_torch, capture_output=True, timeout=HANG, check=False).returncode == 0:
        pytest.skip("torch itself opens a file as number 0")


@pytest.mark.usefixtures("zero_stays_free")
@pytest.mark.parametrize("workers", [0, 1])
def test_closed_descriptors_stay_closed_to_the_script(workers, tmp_path):
    write(tmp_path, "train.py", PRINTING)
    seen = []
    for arguments in ((), RUN):
        command = [sys.executable, *arguments, "train.py", str(0 if not arguments else workers)]
        shell = " ".join(command) + " >&- 2>&- <&-"
        done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, env=environment(), timeout=HANG, check=False)
        assert done.returncode == 0
        seen.append(results(tmp_path))
    bare, ours = seen
    assert ours == bare
    assert bare["outcomes"] == [["read", 0, "9"], ["write", 1, "9"], ["write", 2, "9"]], "bad file descriptor"
    assert bare["child"] == [9, 9, 9]
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert b"the script" not in path.read_bytes(), path
    assert events(tmp_path / "run", "run_end")[0]["steps_total"] == 200


@pytest.mark.usefixtures("zero_stays_free")
def test_no_descriptor_of_ours_is_a_standard_one(tmp_path):
    """They are closed after the start, and the script wants their numbers for its own files."""
    run_script(
        """
        import json, os, sys, threading, urllib.request
        os.close(0)
        import telemetry
        agent = telemetry.start("run", port=0, start_line=False, interval_seconds=0.1, log_interval_seconds=0.1)
        os.close(1)
        os.close(2)
        agent.event_log.log.file.forget()  # both are opened anew, and find the numbers free
        agent._node.board.server_lock.close()
        agent._node._close()
        while not agent._node.endpoint or not agent.event_log.log.file._file:
            agent._thread.join(0.01)
        assert urllib.request.urlopen(agent.metrics_url).status == 200
        from telemetry.hooks.worker_block import WorkerBlock
        ours = [
            WorkerBlock(1)._descriptor(),
            agent.event_log.log.file._file.number,
            agent._node.endpoint._listening.number,
            agent._node.board.server_lock._file.number,
        ]
        theirs = [os.open(f"theirs-{number}", os.O_CREAT | os.O_WRONLY) for number in range(2)]
        telemetry.stop()
        theirs.append(os.open("theirs-2", os.O_CREAT | os.O_WRONLY))
        with open("results.json", "w") as file:
            json.dump([ours, theirs], file)
        """,
        tmp_path,
    )
    ours, theirs = results(tmp_path)
    assert min(ours) > 2
    assert theirs == [1, 2, 0], "what was closed at the start is free again after the stop"


@pytest.mark.usefixtures("zero_stays_free")
def test_a_child_of_the_training_has_its_numbers_back(tmp_path):
    run_script(
        """
        import json, os
        os.close(0)
        import telemetry
        telemetry.start("run", port=0, start_line=False)
        pid = os.fork()
        if pid == 0:
            os._exit(os.open("/dev/null", os.O_RDONLY))
        with open("results.json", "w") as file:
            json.dump(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file)
        """,
        tmp_path,
    )
    assert results(tmp_path) == 0


# -- a stderr that cannot take a line ----------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["print('done')", "import sys; sys.exit(3)"])
def test_a_full_stderr_leaves_the_exit_status(source, tmp_path):
    write(tmp_path, "train.py", source)
    seen = []
    for arguments in ((), RUN):
        with open("/dev/full", "w") as full:  # noqa: PTH123
            done = subprocess.run(
                [sys.executable, *arguments, "train.py"],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=full,
                timeout=HANG,
                check=False,
            )
        seen.append((done.returncode, done.stdout))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("arguments", [("run", "nowhere.py"), ("run", "--port", "x", "train.py")])
def test_a_full_stderr_leaves_the_status_of_a_usage_error(arguments, tmp_path):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "telemetry", *arguments], cwd=tmp_path, env=environment(), stderr=full, check=False
        )
    assert done.returncode == 2


def test_a_full_pipe_or_one_without_a_reader_is_not_waited_for(tmp_path):
    """With SIGPIPE at its default, a write to the second stream would end the process."""
    run_script(
        """
        import json, os, signal
        import telemetry
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        kept = os.dup(2)
        read, full = os.pipe()
        os.set_blocking(full, False)
        try:
            while os.write(full, b"x" * 65536):
                pass
        except BlockingIOError:
            pass
        os.set_blocking(full, True)
        gone, broken = os.pipe()
        os.close(gone)
        counts = []
        for each in (full, broken):
            os.dup2(each, 2)
            agent = telemetry.start(f"run-{each}", port="off")
            counts.append(agent.errors.counts)
            telemetry.stop()
        os.dup2(kept, 2)
        with open("results.json", "w") as file:
            json.dump(counts, file)
        """,
        tmp_path,
    )
    assert results(tmp_path) == [{"start_line": 1}, {"start_line": 1}]


class Notebook(io.TextIOBase):
    """A stream without a file that records what is flushed."""

    def __init__(self) -> None:
        self.pending, self.shown = "", ""

    def write(self, text):
        self.pending += text

    def flush(self):
        self.shown, self.pending = self.shown + self.pending, ""


def test_a_stderr_that_is_replaced_gets_the_line(monkeypatch, tmp_path):
    for stream in (Notebook(), io.TextIOWrapper(io.BytesIO(), "latin-1", errors="strict", write_through=True)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert errors.say("über \x1b[31m") == (isinstance(stream, Notebook) or errors.say("x"))
        shown = stream.shown if isinstance(stream, Notebook) else stream.buffer.getvalue().decode("latin-1")
        assert shown.startswith("über ?[31m\n")
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stderr", file)
        file.write("before ")
        assert errors.say("é after")
        file.write("last\n")
    assert (tmp_path / "log").read_text() == "before \\xe9 after\nlast\n"
    for gone in (None, object()):
        monkeypatch.setattr(sys, "stderr", gone)
        assert errors.say("nobody hears it") is False


# -- files that are replaced whole -------------------------------------------------------------------------------


def test_two_writers_of_a_file_never_meet(tmp_path):
    """Both have the same pid, like processes of two nodes or containers."""
    source = """
        import os, sys
        from pathlib import Path
        from telemetry.node.prometheus import TargetFile
        from telemetry.util.files import replace_file
        os.getpid = lambda: 77
        content = (sys.argv[1] * 2000).encode()
        targets = TargetFile(Path("targets"), "run", "node")
        for number in range(700):
            Path("shared").mkdir(exist_ok=True)
            replace_file("shared/plan.json", content)
            targets.write("host", number)
        """
    write(tmp_path, "writer.py", source)
    writers = [
        subprocess.Popen([sys.executable, "writer.py", name], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
        for name in "ab"
    ]
    torn = []
    while any(writer.poll() is None for writer in writers):
        try:
            content = (tmp_path / "shared" / "plan.json").read_bytes()
        except FileNotFoundError:
            continue
        if content not in {b"a" * 2000, b"b" * 2000}:
            torn.append(content)
    assert [writer.communicate(timeout=HANG)[1] for writer in writers] == [b"", b""]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert torn == []
    assert os.listdir(tmp_path / "shared") == ["plan.json"]
    assert os.listdir(tmp_path / "targets") == ["run.node.json"]


def test_a_temporary_name_says_whose_it_is_and_repeats_never():
    names = {files.temporary_name("x" * 255) for _ in range(1000)}
    assert len(names) == 1000
    assert all(name.startswith(".") and name.endswith(".tmp") and f".{os.getpid()}." in name for name in names)
    assert max(len(os.fsencode(name)) for name in names) <= 255


def test_nobody_makes_temporary_names_of_its_own():
    package = os.path.dirname(files.__file__)
    users = []
    for folder, _, names in os.walk(package):
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    text = file.read()
                if '.tmp"' in text or "mkstemp" in text:
                    users.append(name)
    assert users == ["files.py"]


def test_what_cannot_be_written_whole_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    files.replace_file(path, b"before")
    assert files.replace_file(path, b"not this", first=True) is False
    code = f"""
import resource, signal
from telemetry.util.files import replace_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
replace_file({str(path)!r}, b"x" * 1000)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("OSError: [Errno 28] no room for all of it")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"before", ["file"])
