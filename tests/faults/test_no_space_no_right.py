"""Full disks, read-only file systems and taken ports: the run goes on, and the reports stay true."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from faults.processes import (
    HANG,
    Child,
    environment,
    events,
    fetch,
    python,
    results,
    value,
    wait_for,
    write,
)
from tests.faults.surroundings import QUIET, TRAINING
from tests.free_ports import free_ports


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not _can_mount(), reason="no mount namespace can be had here")


def in_namespace(mount: str, script: Path, *arguments: object) -> list[str]:
    """A command line that runs Python with a private ``mount`` (a line of shell)."""
    line = f'{mount} && exec "$0" "$@"'
    return ["unshare", "-rm", "sh", "-c", line, sys.executable, *map(str, (script, *arguments))]


# -- no room, no right -------------------------------------------------------------------------------------------


@needs_mounts
def test_a_full_disk_costs_log_lines_and_nothing_else(tmp_path):
    """The run folder is on a tiny file system that becomes full during the run, and has room again later."""
    disk = tmp_path / "disk"
    disk.mkdir()
    source = """
        import json, os, sys, telemetry
        agent = telemetry.start("disk/run", run="r")
        def until(condition):
            for _ in range(6000):
                if condition():
                    return
                agent._thread.join(0.01)
            raise SystemExit("not within the deadline")
        seen = list(telemetry.watch(list(range(100))))
        until(lambda: agent.accounting.stats.steps == 100)
        with open("disk/filler", "wb", buffering=0) as filler:
            try:
                while filler.write(b"x" * 512):
                    pass
            except OSError:
                pass
        until(lambda: agent.event_log.log.file.dropped > 3)
        seen += telemetry.watch(list(range(50)))
        os.unlink("disk/filler")
        dropped = agent.event_log.log.file.dropped
        size = agent.event_log.log.file.path.stat().st_size
        until(lambda: agent.event_log.log.file.path.stat().st_size > size + 2000)
        telemetry.stop()
        with open("results.json", "w") as file:
            log = agent.event_log.log.file.path.read_text()
            json.dump([len(seen), agent.errors.counts, agent.event_log.log.file.dropped, log], file)
        """
    script = write(tmp_path, "script.py", source)
    mount = "mount -t tmpfs -o size=64k none disk"
    done = subprocess.run(
        in_namespace(mount, script),
        cwd=tmp_path,
        env=environment(**QUIET),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    seen, errors, dropped, log = results(tmp_path)
    assert seen == 150
    assert errors["jsonl"] >= dropped > 3
    lines, torn = [], 0
    for line in log.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            torn += 1
    assert torn <= 2, "at most the line at which the disk was full"
    assert lines[-1]["event"] == "run_end"
    assert lines[-1]["steps_total"] == 150
    assert lines[-1]["log_lines_dropped"] == dropped
    assert lines[-1]["errors_total"]["jsonl"] == errors["jsonl"]


@needs_mounts
def test_a_board_without_room_never_shows_half_a_state(tmp_path):
    """/dev/shm is full of the workers' batches: the last complete state stays, and no partial one is served."""
    source = """
        import os, sys, telemetry, urllib.request
        agent = telemetry.start("run", run="r")
        with open("/dev/shm/filler", "wb", buffering=0) as filler:
            try:
                while filler.write(b"x" * 256):
                    pass
            except OSError:
                pass
        for _ in range(6000):
            if agent.errors.counts.get("exposition", 0) > 2:
                break
            agent._thread.join(0.01)
        with urllib.request.urlopen(agent.metrics_url) as page:
            print(page.read().decode())
        left = [name for _, _, names in os.walk("/dev/shm") for name in names if name.endswith(".tmp")]
        print("# left", left)
        """
    script = write(tmp_path, "script.py", source)
    done = subprocess.run(
        in_namespace("mount -t tmpfs -o size=32k none /dev/shm", script),
        cwd=tmp_path,
        env=environment(**QUIET),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    page, _, left = done.stdout.rpartition("# left ")
    assert value(page, "training_run_info", run="r", rank="0") == 1
    assert value(page, "training_time_seconds_total", category="other") is not None
    assert events(tmp_path / "run", "run_end")[0]["errors_total"]["exposition"] > 2
    assert left.strip() == "[]"


FULL = """
    import os, sys
    from contextlib import ExitStack
    from pathlib import Path
    from faults.processes import Child, fetch, value, wait_for

    def steps(rank):
        return value(fetch(url), "training_steps_total", rank=str(rank))

    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            ranks.append(stack.enter_context(Child(sys.argv[1], cwd=Path.cwd(), env=env)))
            url = ranks[rank].line()
        def tell(what):
            for rank in ranks:
                rank.tell(what)
                rank.line()
        for rank in range(2):
            wait_for(lambda: steps(rank) == 10, "the steps are there", 60)
        filler = Path("/dev/shm/filler").open("wb", buffering=0)
        def fill():
            before = filler.tell()
            for size in (1 << 16, 256):
                try:
                    while filler.write(b"x" * size):
                        pass
                except OSError:
                    pass
            return filler.tell() > before
        while fill():
            tell("wait")  # each has failed to write, and has made room with that
        for what in ("wait", "train"):
            assert value(fetch(url), "training_run_info", rank="0") == 1
            tell(what)
        wait_for(lambda: steps(0) == 20, "who serves needs no room for its own", 60)
        assert steps(1) in {None, 20}, "what the other one wrote before is gone; a page that is free may be enough"
        filler.truncate(0)
        wait_for(lambda: steps(1) == 20, "there is room again", 60)
        for rank in ranks:
            rank.tell("end")
            assert rank.wait() == 0, rank.stderr
            assert rank.stderr == ""
    """

FULL_RANK = """
    import sys, telemetry
    agent = telemetry.start("run", run="r")
    source = telemetry.watch(iter(lambda: 1, 0))
    for _ in range(11):
        next(source)
    print(agent.metrics_url, flush=True)
    for command in sys.stdin:
        before = agent.errors.counts.get("exposition", 0)
        while command == "wait\\n" and agent.errors.counts.get("exposition", 0) == before:
            agent._thread.join(0.01)
        if command == "end\\n":
            break
        for _ in range(10 if command == "train\\n" else 0):
            next(source)
        print("done", flush=True)
    telemetry.stop()
    """


@needs_mounts
def test_figures_that_cannot_be_written_are_absent(tmp_path):
    """/dev/shm is full: what a rank wrote last would pass for what it does now. It comes back when there is room."""
    rank = write(tmp_path, "rank.py", FULL_RANK)
    script = write(tmp_path, "script.py", FULL)
    done = subprocess.run(
        in_namespace("mount -t tmpfs -o size=256k none /dev/shm", script, rank),
        cwd=tmp_path,
        env=environment(**QUIET, TELEMETRY_PORT=str(free_ports())),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr


# -- whose folder it is --------------------------------------------------------------------------------------------

STRANGER = 12345


def _is_root() -> bool:
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    return os.geteuid() == 0 and shutil.which("setpriv") is not None and subprocess.run(probe).returncode == 0


needs_root = pytest.mark.skipif(not _is_root(), reason="only root can make a folder of another user")

TWO_RANKS = """
    import os, sys
    from contextlib import ExitStack
    from pathlib import Path
    from faults.processes import Child, fetch, samples, wait_for

    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            ranks.append(stack.enter_context(Child(sys.argv[1], "run", cwd=Path.cwd(), env=env)))
            url = ranks[rank].line()
            assert url.startswith("http"), url
        shown = lambda: {labels["rank"] for labels, _ in samples(fetch(url)).get("training_run_info", [])}
        wait_for(lambda: shown() == {"0", "1"}, "both ranks are on one page", 60)
        print(sorted(path.name for path in Path("/dev/shm").iterdir()))
        for rank in ranks:
            rank.tell("end")
            assert rank.wait() == 0
            assert rank.stderr == "", rank.stderr
    """


@pytest.fixture
def open_folder():
    """A folder that every user may enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, STRANGER, STRANGER)
        yield Path(name)


def two_ranks(folder: Path, prepare: str, *, user: str = "") -> list[str]:
    """Run two ranks with an empty /dev/shm in which ``prepare`` has been done. Returns what is in it then."""
    lines = [
        "mount -t tmpfs -o mode=1777 none /dev/shm",
        f"mount --bind {sys.base_prefix} /mnt",  # the interpreter may be in a folder that only root may enter
        prepare,
        f'exec {user} /mnt/bin/{Path(sys.executable).resolve().name} "$0" "$@"',
    ]
    script, rank = write(folder, "script.py", TWO_RANKS), write(folder, "rank.py", TRAINING)
    env = environment(**QUIET, TELEMETRY_PORT=str(free_ports()), PYTHONHOME="/mnt", PYTHONDONTWRITEBYTECODE="1")
    env["LD_LIBRARY_PATH"] = "/mnt/lib"
    env["PYTHONPATH"] += os.pathsep + sysconfig.get_path("purelib")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", " && ".join(lines), script, rank],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def told(folder: Path) -> set[str]:
    return {line["message"] for line in events(folder / "run", "error") if line["source"] == "board"}


@needs_root
@pytest.mark.parametrize("user", ["unshare -U -r", "unshare -U"])
def test_a_user_who_is_root_in_a_namespace_does_not_meet_root(user, open_folder):
    """In a container without privileges a user may have uid 0, or none that has a name."""
    probe = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", *user.split()]
    if subprocess.run([*probe, "true"], capture_output=True).returncode != 0:
        pytest.skip("the kernel gives ordinary users no user namespace")
    roots = "mkdir -m 700 /dev/shm/torch-telemetry-0 /dev/shm/torch-telemetry-65534"
    there = two_ranks(open_folder, roots, user=" ".join(probe))
    if user == "unshare -U -r":
        assert there == ["torch-telemetry-0", f"torch-telemetry-{STRANGER}", "torch-telemetry-65534"]
        assert told(open_folder) == set()
    else:
        assert there == ["torch-telemetry-0", "torch-telemetry-65534", "torch-telemetry-65534-2"]


@needs_root
@pytest.mark.parametrize(
    "taken",
    [
        f"mkdir -m 700 NAME && chown {STRANGER} NAME",
        f"mkdir -m 777 NAME && chown {STRANGER} NAME",
        "mkdir -m 777 NAME",
        f"mkdir -m 700 /dev/shm/theirs && ln -s /dev/shm/theirs NAME && chown -h {STRANGER} NAME",
        "touch NAME",
    ],
)
def test_a_folder_that_is_somebody_elses_is_left_alone(taken, open_folder):
    usual = "/dev/shm/torch-telemetry-0"
    there = two_ranks(open_folder, taken.replace("NAME", usual))
    assert set(there) - {"theirs"} == {"torch-telemetry-0", "torch-telemetry-0-2"}
    assert told(open_folder) == {f"{usual} is not a folder of this user alone; the board is in {usual}-2"}


def test_a_file_may_not_grow_any_more(tmp_path):
    """RLIMIT_FSIZE, which many clusters set."""
    script = write(
        tmp_path,
        "script.py",
        """
        import resource, telemetry
        agent = telemetry.start("run", run="r")
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
        seen = list(telemetry.watch(list(range(100))))
        for _ in range(6000):
            if agent.event_log.log.file.dropped > 2:
                break
            agent._thread.join(0.01)
        telemetry.stop()
        print(len(seen), agent.errors.counts["jsonl"] > 2)
        """,
    )
    done = python(script, cwd=tmp_path, env=environment(**QUIET))
    assert (done.returncode, done.stdout, done.stderr) == (0, "100 True\n", "")


def test_a_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with Child(write(tmp_path, "s.py", TRAINING), "file/run", cwd=tmp_path, env=environment(**QUIET)) as child:
        url = child.line()
        child.tell()
        wait_for(lambda: (value(fetch(url), "training_steps_total") or 0) >= 99, "metrics are served all the same")
        assert value(fetch(url), "telemetry_errors_total", source="jsonl") > 0
        child.tell("end")
        seen, errors, dropped = json.loads(child.line())
        assert child.wait() == 0
        assert child.stderr == ""
    assert seen == 100
    assert errors["jsonl"] >= dropped > 0
    assert (tmp_path / "file").read_text() == "in the way"


def test_the_start_line_says_that_there_is_no_log(tmp_path):
    (tmp_path / "file").write_text("in the way")
    write(tmp_path, "script.py", "print('trained')")
    done = python("-m", "telemetry", "run", "--run-dir", "file/run", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert re.fullmatch(r"telemetry: run run, rank 0: metrics at .*, no logs \(.*Not a directory.*\)\n", done.stderr)


@needs_mounts
@pytest.mark.parametrize("what", ["run", "/dev/shm", "/dev/shm and TMPDIR"])
def test_a_file_system_that_is_read_only(what, tmp_path):
    for folder in ("run", "tmp"):
        (tmp_path / folder).mkdir()
    mounts = {
        "run": "mount -t tmpfs -o ro none run",
        "/dev/shm": "mount -t tmpfs -o ro none /dev/shm",
        "/dev/shm and TMPDIR": "mount -t tmpfs -o ro none /dev/shm && mount -t tmpfs -o ro none tmp",
    }
    source = """
        import json, sys, telemetry, threading, urllib.request
        agent = telemetry.start("run", run="r")
        seen = list(telemetry.watch(list(range(100))))
        page, url = "", agent.metrics_url
        for _ in range(6000):
            if agent.accounting.stats.steps == 100 and (url is None or ' 100.0' in page):
                break
            threading.Event().wait(0.01)
            page = urllib.request.urlopen(url).read().decode() if url else ""
        telemetry.stop()
        print(json.dumps([len(seen), agent.errors.counts, page]))
        """
    script = write(tmp_path, "script.py", source)
    # From inside a writable file system, because Python itself needs a temporary folder here.
    done = subprocess.run(
        in_namespace(mounts[what], script),
        cwd=tmp_path,
        env=environment(**QUIET, TMPDIR=str(tmp_path / "tmp")),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    seen, errors, page = json.loads(done.stdout)
    assert seen == 100
    if what == "run":
        assert errors["jsonl"] > 0
        assert value(page, "training_steps_total") == 100
    else:
        assert events(tmp_path / "run", "run_end")[0]["steps_total"] == 100
    if what == "/dev/shm":
        assert value(page, "training_steps_total") == 100, "the board lies in TMPDIR"
    if what == "/dev/shm and TMPDIR" and not page:
        assert errors["board"] == 1


def test_a_port_that_another_program_has(tmp_path):
    port = free_ports()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        env = environment(**QUIET, TELEMETRY_PORT=str(port))
        with Child(write(tmp_path, "s.py", TRAINING), "run", cwd=tmp_path, env=env) as child:
            url = child.line()
            found = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/metrics", url)[1])
            assert port < found <= port + 63
            (target,) = (tmp_path / "run" / "targets").glob("*.json")
            assert json.loads(target.read_text())[0]["targets"] == [f"127.0.0.1:{found}"]

            def told():
                return [line for line in events(tmp_path / "run", "error") if line["source"] == "endpoint"]

            (line,) = wait_for(told, "the log says so")
            assert line["message"] == f"port {port} is taken; the metrics of this run are at port {found}"
            assert value(fetch(url), "telemetry_errors_total", source="endpoint") is None, "a notice is no error"
            child.tell("end")
            assert child.line()
            assert child.wait() == 0
