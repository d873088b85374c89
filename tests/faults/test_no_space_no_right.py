"""Full disks, read-only file systems and taken ports: the run goes on, and the reports stay true."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
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
        with urllib.request.urlopen(agent.metrics_url) as page:
            before = page.read()
        size = len(before)
        with open("/dev/shm/filler", "wb", buffering=0) as filler:
            try:
                while filler.write(b"x" * 256):
                    pass
            except OSError:
                pass
        os.truncate("/dev/shm/filler", os.stat("/dev/shm/filler").st_size - 4096)  # room for a part of it
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
