"""A snapshot's export is killed at any stage, or the disk is full."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from faults.processes import environment, events, results, run_script, write
from faults.snapshot_scripts import LOOP, whole
from tests.faults.warm_python import warm_python

STAGES = ("saving", "begun", "saved", "compressing", "compressed", "verified", "published")

KILLED = """
import glob, json, os, signal, sys
from loop import loop, start
from telemetry.snapshot import snapshot_outcome, store

stage = sys.argv[1]


def kill(at):
    if at == stage:
        with open("left.json", "w") as file:
            json.dump(glob.glob("run/snapshots/.partial-*") + glob.glob("run/snapshots/.partial-*/*"), file)
        os.kill(os.getpid(), signal.SIGKILL)


publish, save = store.TraceStore.publish, snapshot_outcome.RecordedTrace.save
store.TraceStore.publish = lambda self, trace, folder, name, extra_events: publish(
    self, trace, folder, name, extra_events=extra_events, on_stage=kill
)
snapshot_outcome.RecordedTrace.save = lambda self, path: (save(self, path), kill("saving"))[0]
agent = start()
loop(agent, lambda: agent.snapshots.counts["failed"])
"""


def left_by_a_kill(folder, stage, env):
    """Kill a process while it exports. The result is what it left.

    It makes the list itself: any agent that starts on this machine, as those of other tests, may remove it at once.
    """
    write(folder, "loop.py", LOOP)
    script = write(folder, "killed.py", KILLED)
    assert warm_python(script, stage, cwd=folder, env=env).returncode == -9
    return json.loads((folder / "left.json").read_text())


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_stage_publishes_only_complete_files(tmp_path, stage):
    env = environment(TMPDIR=str(tmp_path))
    left = left_by_a_kill(tmp_path, stage, env)
    assert left, "the kill came after it had cleared up"
    published = list(tmp_path.glob("run/snapshots/request-step*/*.gz"))
    assert len(published) == (stage == "published")
    assert all(whole(path) for path in published)
    again = run_script(
        """
        import telemetry
        telemetry.start("run", start_line=False)
        telemetry.stop()
        """,
        tmp_path,
        env=env,
        run=warm_python,
    )
    assert not [path for path in left if (tmp_path / path).exists()]
    assert again.stderr == ""


@pytest.mark.parametrize(("stage", "left"), [("saving", "trace.json"), ("verified", "packed")])
def test_another_run_removes_what_a_kill_has_left(tmp_path, stage, left):
    """The raw trace has a name while torch saves it, and the compressed one until it is published.

    Nobody may ever start in that run folder again.
    """
    env = environment(TMPDIR=str(tmp_path))
    assert any(path.endswith(f"/{left}") for path in left_by_a_kill(tmp_path, stage, env))
    done = run_script(
        """
        import telemetry
        from telemetry.core import own_threads
        telemetry.start("another-run", start_line=False)
        for thread in [*own_threads._running.values()]:
            if thread.name == "telemetry-sweep":
                thread.join()
        telemetry.stop()
        """,
        tmp_path,
        env=env,
        run=warm_python,
    )
    assert not list(tmp_path.glob("run/snapshots/.partial-*"))
    assert done.stderr == ""


FULL = """
import json, os
from pathlib import Path
from telemetry.snapshot import export_space, store

export_space.MIN_FREE_BYTES = -(1 << 40)  # not to be stopped by the look at the free space beforehand
store._PROBE_BYTES = 1
here = Path("full/run/snapshots")
content = b'{"traceEvents": [' + b",".join(b'"%s"' % os.urandom(30).hex().encode() for _ in range(600)) + b"]}"


class Trace:
    def max_bytes(self):
        return len(content)

    def save(self, path):
        path.write_bytes(content)
        return 0.0

    def free(self):
        return 0.0


def fill(pages):
    filler.unlink(missing_ok=True)
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
        file.truncate(max(0, file.tell() - 4096 * pages))


filler = Path("full/filler")
outcomes = []
for shared in (Path("shared"), None):
    for pages in range(40):
        fill(pages)
        trace_store = store.TraceStore(here, shared, "node-1-1", 1 << 20, 1 << 20)
        try:
            trace_store.publish(Trace(), "request-step5", "rank-0.gz")
            outcomes.append("kept")
        except (OSError, store.StoreError) as error:
            outcomes.append(type(error).__name__)
        filler.unlink()
        files = [str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()]
        assert files == (["request-step5/rank-0.gz"] if outcomes[-1] == "kept" else []), (pages, outcomes[-1], files)
        assert not [name for name in os.listdir(here) if name.startswith(".partial")] if here.exists() else True
        for name in os.listdir(here) if here.exists() else ():
            with store.open_folder(here) as folder:
                folder.remove(name)
with open("results.json", "w") as file:
    json.dump(outcomes, file)
"""


def test_a_disk_that_is_full_at_any_stage(tmp_path):
    """A private file system, filled up to a number of free pages, so that the export fails at each of its stages."""
    (tmp_path / "full").mkdir()
    (tmp_path / "shared").mkdir(mode=0o700)
    script = write(tmp_path, "full.py", FULL)
    mount = f"mount -t tmpfs -o size=512k,mode=700 none full && exec {sys.executable} {script}"
    namespace = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("a file system of one's own needs mount namespaces")
    done = subprocess.run(
        [*namespace, "sh", "-c", mount], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    outcomes = results(tmp_path)
    assert outcomes[0] != "kept"
    assert outcomes[39] == "kept"
    assert {"OSError", "kept"} <= set(outcomes)


def test_no_room_is_seen_beforehand_and_told(tmp_path):
    write(tmp_path, "loop.py", LOOP)
    done = run_script(
        """
        from loop import loop, start
        from telemetry.snapshot import export_space
        export_space.MIN_FREE_BYTES = 1 << 60
        agent = start()
        loop(agent, lambda: sum(agent.snapshots.counts.values()))
        telemetry = __import__("telemetry"); telemetry.stop()
        """,
        tmp_path,
        run=warm_python,
    )
    (line,) = events(tmp_path / "run", "snapshot")
    assert (line["result"], line["path"]) == ("failed", None)
    assert "no room" in line["why"]
    assert done.stderr == ""
