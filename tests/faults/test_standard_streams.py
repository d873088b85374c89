"""Stdin, stdout and stderr are closed, full, replaced or blocked: the script finds them as without the agent."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from telemetry.safety import errors, files
from tests.faults.processes import (
    HANG,
    RUN,
    Child,
    end_of,
    environment,
    events,
    finished,
    of_rank,
    quiet,
    report_text,
    run,
    wait_for,
    write,
)

FAST = (*RUN, "--interval-seconds", "0.1", "--log-interval-seconds", "0.1")

# -- closed ones ---------------------------------------------------------------------------------------------------

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
def test_closed_descriptors_stay_closed_to_the_script_and_its_workers(tmp_path):
    write(tmp_path, "train.py", PRINTING)
    seen = []
    for workers, under in (("0", ()), ("1", FAST)):  # with workers torch itself hangs where the descriptors are closed
        shell = " ".join([sys.executable, *under, "train.py", workers]) + " >&- 2>&- <&-"
        subprocess.run(["sh", "-c", shell], cwd=tmp_path, env=environment(), timeout=HANG, check=True)
        seen.append(json.loads((tmp_path / "results.json").read_text()))
    bare, ours = seen
    assert ours == bare
    assert bare["outcomes"] == [["read", 0, "9"], ["write", 1, "9"], ["write", 2, "9"]], "bad file descriptor"
    assert bare["child"] == [9, 9, 9]
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"the script" not in path.read_bytes(), path
    assert end_of(tmp_path / "run")["steps_total"] == 200


@pytest.mark.usefixtures("zero_stays_free")
def test_no_descriptor_of_ours_is_a_standard_one(tmp_path):
    """They are closed after the start, and the script and its children want their numbers for their own files."""
    source = """
        import os
        os.close(0)
        import telemetry
        from telemetry.seams.worker_block import WorkerBlock
        from tests.faults.inside import log_file, page, tell, until
        agent = telemetry.start("run")
        os.close(1)
        os.close(2)
        log_file().forget()  # both are opened anew, and find the numbers free
        agent._node.board.server_lock.close()
        agent._node._close()
        until(lambda: agent._node.endpoint and log_file()._file)
        assert page()
        pid = os.fork()
        if pid == 0:
            os._exit(os.open("/dev/null", os.O_RDONLY))
        child = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        block = WorkerBlock(1).by_file()
        ours = [
            block._descriptor(),
            log_file()._file.number,
            agent._node.endpoint._listening.number,
            agent._node.board.server_lock._file.number,
        ]
        theirs = [os.open(f"theirs-{number}", os.O_CREAT | os.O_WRONLY) for number in range(2)]
        telemetry.stop()
        theirs.append(os.open("theirs-2", os.O_CREAT | os.O_WRONLY))
        tell([min(ours), child, theirs])
        """
    ours, child, theirs = run(tmp_path, source)
    assert ours > 2
    assert child == 0, "a child of the training has its numbers back"
    assert theirs == [1, 2, 0], "what was closed at the start is free again after the stop"


# -- a stderr that cannot take a line ------------------------------------------------------------------------------

TRAINS = "import os, sys, telemetry\nfor _ in telemetry.watch(range(20)): pass\n"


def full_device() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def without_reader() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("stream", [full_device, without_reader])
def test_a_stderr_that_takes_nothing_leaves_the_exit_status(stream, tmp_path):
    """It takes neither the first line nor the last one."""
    script, seen = write(tmp_path, "script.py", TRAINS + "print('done'); sys.exit(3)"), []
    for under in ((), FAST):
        target = stream()
        command, env = [sys.executable, *under, script], environment(TELEMETRY_END_LINE="on")
        done = subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=target, timeout=HANG)
        os.close(target)
        seen.append((done.returncode, done.stdout))
    assert seen[0] == seen[1]
    assert end_of(tmp_path / "run")["steps_total"] == 20
    command = [sys.executable, "-m", "telemetry", "run", "nowhere.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), stderr=stream(), check=False)
    assert done.returncode == 2, "a usage error"


def test_a_full_pipe_or_one_without_a_reader_is_not_waited_for_at_the_start(tmp_path):
    """With SIGPIPE at its default, a write to the second stream would end the process."""
    source = """
        import os, signal, telemetry
        from tests.faults.inside import tell
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        kept = os.dup(2)
        read, full = os.pipe()
        os.set_blocking(full, False)
        try:
            while os.write(full, b"x" * 65536):
                pass
        except BlockingIOError:
            os.set_blocking(full, True)
        gone, broken = os.pipe()
        os.close(gone)
        counts = []
        for each in (full, broken):
            os.dup2(each, 2)
            counts.append(telemetry.start(f"run-{each}", port="off").errors.counts)
            telemetry.stop()
        os.dup2(kept, 2)
        tell(counts)
        """
    assert run(tmp_path, source, env=environment()) == [{"start_line": 1}, {"start_line": 1}]


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


# -- what the last line says ---------------------------------------------------------------------------------------

LINE = re.compile(r"^telemetry: (?!run ).*; see: telemetry report .*\n", re.MULTILINE)

STICKS = """
    import telemetry, time
    try:
        for number, _ in enumerate(telemetry.watch(range(100))):
            if number == 15:
                time.sleep(100)
    finally:
        time.sleep(1)
"""


def test_a_stuck_run_that_is_interrupted_says_so_and_so_does_its_report(tmp_path):
    """Also if its clean-up takes several ticks."""
    script, env = write(tmp_path, "script.py", STICKS), quiet(TELEMETRY_END_LINE="on")
    with Child(*RUN, "--stuck-seconds", "1", script, cwd=tmp_path, env=env) as child:
        wait_for(lambda: events(tmp_path / "run", "stall_open", running=True), "it is stuck")
        child.send(signal.SIGINT)
        child.wait()
        (line,) = LINE.findall(child.stderr)
    said = "Stuck before its end: rank 0 was in the compute of a step and had not gone on since"
    assert line.startswith(f"telemetry: {said}"), line
    assert said in report_text(tmp_path / "run")


TWO_RANKS = """
    import os, sys, telemetry, time

    def batches(rank):
        while True:
            time.sleep(0.02 * rank)
            yield 1

    rank = int(os.environ["RANK"])
    for number, _ in enumerate(telemetry.watch(batches(rank))):
        time.sleep(0.01 * (1 - rank))
        if number == 5:
            print("trains", flush=True)
        if rank and number == 150 or os.path.exists("rank-1-has-ended"):
            break
"""


def test_rank_0_tells_of_a_rank_that_ended_before_it(tmp_path):
    script = write(tmp_path, "script.py", TWO_RANKS)
    ranks = [Child(*RUN, script, cwd=tmp_path, env=of_rank(r, TELEMETRY_END_LINE="on")) for r in (0, 1)]
    with ranks[0] as first, ranks[1] as second:
        assert [first.line(), second.line()] == ["trains", "trains"]
        second.ends()
        (tmp_path / "rank-1-has-ended").touch()
        assert first.wait() == 0
        (line,) = LINE.findall(first.stderr)
    assert line.startswith("telemetry: Starved: rank 1 spent ")


# -- files that are replaced whole ---------------------------------------------------------------------------------


def test_two_writers_of_a_file_never_meet(tmp_path):
    """Both have the same pid, like processes of two nodes or containers."""
    source = """
        import os, sys
        from pathlib import Path
        from telemetry.node.prometheus import TargetFile
        from telemetry.safety.files import replace_file
        os.getpid = lambda: 77
        content = (sys.argv[1] * 2000).encode()
        targets = TargetFile(Path("targets"), "run", "node")
        for number in range(700):
            Path("shared").mkdir(exist_ok=True)
            replace_file("shared/plan.json", content)
            targets.write("host", number)
        """
    script, torn = write(tmp_path, "writer.py", source), []
    with Child(script, "a", cwd=tmp_path) as one, Child(script, "b", cwd=tmp_path) as other:
        while None in {one.process.poll(), other.process.poll()}:
            with contextlib.suppress(FileNotFoundError):
                content = (tmp_path / "shared" / "plan.json").read_bytes()
                torn += [content] if content not in {b"a" * 2000, b"b" * 2000} else []
        one.ends()
        other.ends()
    assert torn == []
    assert os.listdir(tmp_path / "shared") == ["plan.json"]
    assert os.listdir(tmp_path / "targets") == ["run.node.json"]


def test_what_cannot_be_written_whole_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    files.replace_file(path, b"before")
    assert files.replace_file(path, b"not this", first=True) is False
    code = f"""
import resource, signal
from telemetry.safety.files import replace_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
replace_file({str(path)!r}, b"x" * 1000)
"""
    done = finished([sys.executable, "-c", code], cwd=tmp_path)
    assert done.stderr.splitlines()[-1].startswith("OSError: [Errno 28] no room for all of it")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"before", ["file"])
