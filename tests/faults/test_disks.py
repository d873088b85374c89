"""Full disks, read-only file systems, foreign folders, and a lack of descriptors or shared memory: the training goes on."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.faults.processes import (
    Child,
    can,
    end_of,
    events,
    fetch,
    finished,
    mounting,
    python,
    quiet,
    run,
    tmpfs,
    told,
    value,
    wait_for,
    write,
)
from tests.free_ports import free_ports

TRAINS = Path(__file__).with_name("trains_on_command.py")

# -- no room -------------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_log_lines_and_nothing_else(tmp_path):
    """The run folder is on a tiny file system that becomes full during the run, and has room again later."""
    (tmp_path / "disk").mkdir()
    source = """
        import os, telemetry
        from tests.faults.inside import fill, log_file, steps, tell, until
        telemetry.start("disk/run", run="r")
        seen = list(telemetry.watch(list(range(100))))
        until(lambda: steps() == 100)
        fill("disk/filler")
        until(lambda: log_file().dropped > 3)
        seen += telemetry.watch(list(range(50)))
        os.unlink("disk/filler")
        dropped, log = log_file().dropped, log_file()
        size = log.path.stat().st_size
        until(lambda: log.path.stat().st_size > size + 2000)
        telemetry.stop()
        tell([len(seen), dropped, log.path.read_text()])
        """
    seen, dropped, log = run(tmp_path, source, start=mounting(tmpfs("disk", "size=64k")))
    assert seen == 150
    lines, torn = [], 0
    for line in log.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            torn += 1
    assert torn <= 2, "at most the line at which the disk was full"
    assert (lines[-1]["event"], lines[-1]["steps_total"]) == ("run_end", 150)
    assert lines[-1]["errors_total"]["jsonl"] >= lines[-1]["log_lines_dropped"] >= dropped > 3


RANKS_WITHOUT_ROOM = """
    import sys
    from contextlib import ExitStack
    from pathlib import Path
    from tests.faults.inside import fill
    from tests.faults.processes import Child, fetch, of_rank, ranks_in, wait_for

    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            env = of_rank(rank, TELEMETRY_PORT=sys.argv[2])
            ranks.append(stack.enter_context(Child(sys.argv[1], cwd=Path.cwd(), env=env)))
            url = ranks[rank].line()
        steps = lambda: ranks_in(fetch(url))
        wait_for(lambda: steps() == {"0": 10, "1": 10}, "the steps are there", 60)
        filler, size = Path("/dev/shm/filler"), -1
        while not filler.exists() or filler.stat().st_size > size:
            size = filler.stat().st_size if filler.exists() else -1
            fill(filler, 1 << 16)
            fill(filler, 256)
            for rank in ranks:
                rank.ask("wait")  # each has failed to write, and has made room with that
        for what in ("wait", "train"):
            assert "0" in steps()
            for rank in ranks:
                rank.ask(what)
        wait_for(lambda: steps()["0"] == 20, "who serves needs no room for its own", 60)
        assert steps().get("1") in {None, 20}, "what it wrote before is gone; a page that is free may be enough"
        filler.write_bytes(b"")
        wait_for(lambda: steps().get("1") == 20, "there is room again", 60)
        for rank in ranks:
            rank.tell("end")
            rank.ends()
    """

RANK_WITHOUT_ROOM = """
    import sys, telemetry
    from tests.faults.inside import errors, until
    agent = telemetry.start("run", run="r")
    source = telemetry.watch(iter(lambda: 1, 0))
    for _ in range(11):
        next(source)
    print(agent.metrics_url, flush=True)
    for command in iter(sys.stdin.readline, "end\\n"):
        before = errors("exposition")
        if command == "wait\\n":
            until(lambda: errors("exposition") > before)
        for _ in range(10 if command == "train\\n" else 0):
            next(source)
        print("done", flush=True)
    telemetry.stop()
    """


def test_figures_that_cannot_be_written_are_absent(tmp_path):
    """/dev/shm is full: what a rank wrote last would pass for what it does now. It comes back when there is room."""
    rank, room = write(tmp_path, "rank.py", RANK_WITHOUT_ROOM), tmpfs("/dev/shm", "size=256k")
    run(tmp_path, RANKS_WITHOUT_ROOM, rank, free_ports(), start=mounting(room))


TINY = """
    import os, shutil, sys, time, torch, telemetry
    from tests.faults.inside import fill
    from torch.utils.data import DataLoader, TensorDataset

    place = sys.argv[1]
    folder = {"run": "run", "tmp": "tmp/here", "shm": "/dev/shm/torch-telemetry-%d" % os.getuid()}[place]
    filler = {"run": "run", "tmp": "tmp", "shm": "/dev/shm"}[place] + "/filler"
    os.makedirs("tmp/here", exist_ok=True)
    total = 0.0
    agent = telemetry.start("run")

    class Large(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.full((65536,), float(index))

    def train(until):
        global total
        step = 0
        while step < 20 or not until():
            for (batch,) in DataLoader(TensorDataset(torch.ones(20, 4)), batch_size=4):
                for _ in range(4000):
                    torch.relu(batch)
                time.sleep(0.02)
                step += 1
                total += float(batch.sum()) if step <= 20 else 0.0

    def snapshot():
        "One more snapshot has been taken, or has failed."
        telemetry.request_snapshot(steps=5)
        return sum(agent.snapshots.counts.values()) > before

    for state in ("tiny", "full", "removed"):
        before = sum(agent.snapshots.counts.values())
        if state == "full":
            fill(filler, 4096)
        if state == "removed":
            os.unlink(filler)
            for name in os.listdir(folder) if os.path.isdir(folder) else ():
                path = os.path.join(folder, name)
                shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)
            if place != "run":  # that one is mounted
                shutil.rmtree(folder, ignore_errors=True)
        end = time.monotonic() + 2
        train(snapshot if state != "removed" else lambda: time.monotonic() > end)
        # Nobody's batches pass through a /dev/shm that is full, with or without the agent.
        if place != "shm" or state != "full":
            assert [float(batch[0, 0]) for batch in DataLoader(Large(), num_workers=1)] == list(range(64))
        print(state, total, flush=True)
    print("to the end", file=sys.stderr)
    sys.exit(3)
"""


# A short name: a socket of multiprocessing lies in TMPDIR, and its path may have 107 bytes.
@pytest.mark.parametrize(("place", "room"), [("run", "3m"), ("tmp", "1m"), ("shm", "6m")], ids=["run", "tmp", "shm"])
def test_no_room(place, room, tmp_path):
    """Each place in turn is tiny, full, or emptied by other code, and a snapshot is larger than its space."""
    for name in ("run", "tmp"):
        (tmp_path / name).mkdir()
    said = "tiny 320.0\nfull 640.0\nremoved 960.0\n"
    env = quiet(TELEMETRY_RUN="r", TMPDIR=str(tmp_path / "tmp" / "here"))
    start = mounting(tmpfs({"shm": "/dev/shm"}.get(place, place), f"size={room},mode=1777"))
    run(tmp_path, TINY, place, env=env, start=start, code=3, out=said, err="to the end\n")
    snapshots = events(tmp_path / "run", "snapshot", running=True)
    if place != "run":
        assert snapshots[0]["result"] == "recorded"


def test_a_file_may_not_grow_any_more(tmp_path):
    """RLIMIT_FSIZE, which many clusters set."""
    source = """
        import resource, telemetry
        from tests.faults.inside import errors, log_file, until
        telemetry.start("run", run="r")
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
        assert len(list(telemetry.watch(list(range(100))))) == 100
        until(lambda: log_file().dropped > 2)
        assert errors("jsonl") > 2
        """
    run(tmp_path, source)


def test_a_reused_descriptor_number_belongs_to_its_new_owner(tmp_path):
    """As a daemon does: all descriptors are closed, and the next files get the numbers of the agent's."""
    source = """
        import os, sys, telemetry
        from telemetry.safety.threads import Wake
        from tests.faults.inside import log_file, page, until

        agent = telemetry.start("run", interval_seconds=0.5, log_interval_seconds=0.5)

        def waits():
            return sys._current_frames()[agent._thread.ident].f_code is Wake.wait.__code__

        while waits():
            pass
        while not waits():
            pass  # what a tick has open while it reads it has a number too, which no thread can close safely then
        os.closerange(3, 64)
        theirs = [os.open(f"theirs-{number}", os.O_CREAT | os.O_RDWR) for number in range(60)]
        before = log_file().path.stat().st_size

        def goes_on():
            try:
                return page() and log_file().path.stat().st_size > before
            except OSError:
                return False

        until(goes_on)
        pid = os.fork()
        if pid == 0:
            raise SystemExit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
        telemetry.stop()
        for number, file in enumerate(theirs):
            assert os.readlink(f"/proc/self/fd/{file}") == os.path.abspath(f"theirs-{number}")
            assert os.fstat(file).st_size == 0
        """
    run(tmp_path, source)
    assert len(events(tmp_path / "run", "run_start")) == len(events(tmp_path / "run", "run_end")) == 1


# -- no right ------------------------------------------------------------------------------------------------------


def test_a_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with Child(TRAINS, "file/run", cwd=tmp_path, env=quiet()) as child:
        url = child.line()
        child.tell()
        wait_for(lambda: (value(fetch(url), "training_steps_total") or 0) >= 99, "metrics are served all the same")
        assert value(fetch(url), "telemetry_errors_total", source="jsonl") > 0
        assert child.ask("end") == "100"
        child.ends()
    assert (tmp_path / "file").read_text() == "in the way"
    done = python("-m", "telemetry", "run", "--run-dir", "file/run", write(tmp_path, "s.py", ""), cwd=tmp_path)
    assert re.fullmatch(r"telemetry: run run, rank 0: metrics at .*, no logs \(.*Not a directory.*\)\n", done.stderr)


@pytest.mark.parametrize("places", [["run"], ["/dev/shm"], ["/dev/shm", "tmp"]], ids=" and ".join)
def test_a_file_system_that_is_read_only(places, tmp_path):
    """With /dev/shm the board lies in TMPDIR."""
    for folder in ("run", "tmp"):
        (tmp_path / folder).mkdir()
    source = """
        import telemetry
        from tests.faults.inside import errors, page, steps, tell, until
        agent = telemetry.start("run", run="r")
        assert len(list(telemetry.watch(list(range(100))))) == 100
        until(lambda: steps() == 100 and (agent.metrics_url is None or " 100.0" in page()))
        tell([errors(), page() if agent.metrics_url else ""])
        """
    start = mounting(*(tmpfs(place, "ro") for place in places))
    # Results go into a writable file system, and Python itself needs a temporary folder.
    errors, page = run(tmp_path, source, env=quiet(TMPDIR=str(tmp_path / "tmp")), start=start)
    if places == ["run"]:
        assert errors["jsonl"] > 0
    else:
        assert end_of(tmp_path / "run")["steps_total"] == 100
    if page:
        assert value(page, "training_steps_total") == 100
    else:
        assert (places[-1], errors["board"]) == ("tmp", 1)


STRANGER = 12345

needs_root = pytest.mark.skipif(
    os.geteuid() != 0
    or not can("setpriv", "--help")
    or not can("unshare", "-m", "sh", "-c", tmpfs("/mnt", "size=64k")),
    reason="only root can make a folder of another user",
)

TWO_RANKS = """
    import sys
    from contextlib import ExitStack
    from pathlib import Path
    from tests.faults.processes import Child, fetch, of_rank, ranks_in, wait_for

    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            env = of_rank(rank, TELEMETRY_PORT=sys.argv[2], PYTHONHOME="/mnt", PYTHONPATH=sys.argv[3])
            ranks.append(stack.enter_context(Child(sys.argv[1], "run", cwd=Path.cwd(), env=env)))
            url = ranks[rank].line()
            assert url.startswith("http"), url
        wait_for(lambda: ranks_in(fetch(url), "training_run_info").keys() == {"0", "1"}, "both ranks are on one page", 60)
        print(sorted(path.name for path in Path("/dev/shm").iterdir()))
        for rank in ranks:
            rank.tell("end")
            rank.ends()
    """


@pytest.fixture
def two_ranks():
    """Runs two ranks with an empty /dev/shm in which something has been done. Returns what is in it, and what is told.

    In a folder that every user may enter, unlike those of pytest.
    """
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, STRANGER, STRANGER)

        def ran(prepare: str, *, user: str = "") -> tuple[list[str], set[str]]:
            env = quiet(PYTHONHOME="/mnt", PYTHONDONTWRITEBYTECODE="1", LD_LIBRARY_PATH="/mnt/lib")
            env["PYTHONPATH"] += os.pathsep + sysconfig.get_path("purelib")
            lines = [
                tmpfs("/dev/shm", "mode=1777"),
                f"mount --bind {sys.base_prefix} /mnt",  # the interpreter may be in a folder that only root may enter
                prepare,
                f'exec {user} /mnt/bin/{Path(sys.executable).resolve().name} "$0" "$@"',
            ]
            script = write(Path(name), "script.py", TWO_RANKS)
            command = ["unshare", "-m", "sh", "-c", " && ".join(lines), script, TRAINS, free_ports(), env["PYTHONPATH"]]
            done = finished(command, cwd=Path(name), env=env)
            assert done.returncode == 0, done.stderr
            return ast.literal_eval(done.stdout), set(told(Path(name) / "run", "board"))

        yield ran


@needs_root
@pytest.mark.parametrize("user", ["unshare -U -r", "unshare -U"])
def test_a_user_who_is_root_in_a_namespace_does_not_meet_root(user, two_ranks):
    """In a container without privileges a user may have uid 0, or none that has a name."""
    probe = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", *user.split()]
    if not can(*probe, "true"):
        pytest.skip("the kernel gives ordinary users no user namespace")
    roots = "mkdir -m 700 /dev/shm/torch-telemetry-0 /dev/shm/torch-telemetry-65534"
    there, messages = two_ranks(roots, user=" ".join(probe))
    if user == "unshare -U -r":
        assert there == ["torch-telemetry-0", f"torch-telemetry-{STRANGER}", "torch-telemetry-65534"]
        assert messages == set()
    else:
        assert there == ["torch-telemetry-0", "torch-telemetry-65534", "torch-telemetry-65534-2"]


@needs_root
@pytest.mark.parametrize(
    "taken",
    [
        f"mkdir -m 700 NAME && chown {STRANGER} NAME",
        "mkdir -m 777 NAME",
        f"mkdir -m 700 /dev/shm/theirs && ln -s /dev/shm/theirs NAME && chown -h {STRANGER} NAME",
        "touch NAME",
    ],
)
def test_a_folder_that_is_somebody_elses_is_left_alone(taken, two_ranks):
    usual = "/dev/shm/torch-telemetry-0"
    there, messages = two_ranks(taken.replace("NAME", usual))
    assert set(there) - {"theirs"} == {"torch-telemetry-0", "torch-telemetry-0-2"}
    assert messages == {f"{usual} is not a folder of this user alone; the board is in {usual}-2"}
