"""Places that are full, closed, taken or named with malice: the run goes on, and what is said of it stays true."""

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
    free_port,
    log_lines,
    python,
    results,
    run_script,
    samples,
    value,
    wait_for,
    without_start_line,
    write,
)
from telemetry.clock import NS, WallClock
from telemetry.report.load import load
from telemetry.report.summary import summarize

QUIET = {"TELEMETRY_START_LINE": "off", "TELEMETRY_INTERVAL_SECONDS": "0.1", "TELEMETRY_LOG_INTERVAL_SECONDS": "0.1"}

# Trains until it is told to end; says what the training itself has seen.
TRAINING = """
    import json, sys, telemetry
    agent = telemetry.start(sys.argv[1], run="r")
    print(agent.metrics_url, flush=True)
    seen = []
    for command in telemetry.watch(iter(sys.stdin.readline, "end\\n")):
        for batch in telemetry.watch(list(range(100))):
            seen.append(batch)
        with telemetry.phase("checkpoint"):
            pass
    telemetry.stop()
    print(json.dumps([len(seen), agent.faults.counts, agent.logbook.log.file.dropped]), flush=True)
"""


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    return subprocess.run(probe, capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not _can_mount(), reason="no mount namespace can be had here")


def in_namespace(mount: str, script: Path, *arguments: object) -> list[str]:
    """A command line that runs Python where ``mount`` (a line of shell) holds for it alone."""
    line = f'{mount} && exec "$0" "$@"'
    return ["unshare", "-rm", "sh", "-c", line, sys.executable, *map(str, (script, *arguments))]


# -- no room, no right -------------------------------------------------------------------------------------------


@needs_mounts
def test_a_full_disk_costs_log_lines_and_nothing_else(tmp_path):
    """The run folder on a tiny file system that fills up while the run goes on, and has room again later."""
    disk = tmp_path / "disk"
    disk.mkdir()
    source = """
        import json, os, sys, telemetry
        agent = telemetry.start("disk/run", run="r")
        def until(condition):
            for _ in range(6000):
                if condition():
                    return
                agent._wake.wait(0.01)
            raise SystemExit("not within the deadline")
        seen = list(telemetry.watch(list(range(100))))
        until(lambda: agent.accounts.stats.steps == 100)
        with open("disk/filler", "wb", buffering=0) as filler:
            try:
                while filler.write(b"x" * 512):
                    pass
            except OSError:
                pass
        until(lambda: agent.logbook.log.file.dropped > 3)
        seen += telemetry.watch(list(range(50)))
        os.unlink("disk/filler")
        dropped = agent.logbook.log.file.dropped
        size = agent.logbook.log.file.path.stat().st_size
        until(lambda: agent.logbook.log.file.path.stat().st_size > size + 2000)
        telemetry.stop()
        with open("results.json", "w") as file:
            log = agent.logbook.log.file.path.read_text()
            json.dump([len(seen), agent.faults.counts, agent.logbook.log.file.dropped, log], file)
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
    """/dev/shm full, as the batches of workers fill it: the last whole state stays, no torn one is served."""
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
            if agent.faults.counts.get("exposition", 0) > 2:
                break
            agent._wake.wait(0.01)
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
            if agent.logbook.log.file.dropped > 2:
                break
            agent._wake.wait(0.01)
        telemetry.stop()
        print(len(seen), agent.faults.counts["jsonl"] > 2)
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
            if agent.accounts.stats.steps == 100 and (url is None or ' 100.0' in page):
                break
            threading.Event().wait(0.01)
            page = urllib.request.urlopen(url).read().decode() if url else ""
        telemetry.stop()
        print(json.dumps([len(seen), agent.faults.counts, page]))
        """
    script = write(tmp_path, "script.py", source)
    # From inside a file system that can be written: Python itself wants a temporary folder for nothing here.
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
    port = free_port()
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


# -- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [1, -1, 24 * 365 * 20])
def test_a_wall_clock_that_jumps_moves_timestamps_and_no_duration(hours):
    wall, mono = [1_700_000_000 * NS], [5 * NS]
    clock = WallClock(lambda: wall[0], lambda: mono[0])
    assert clock.iso() == "2023-11-14T22:13:20.000Z"
    wall[0] += NS // 2  # NTP, slewing: not followed, so that timestamps do not wobble
    assert clock.resync() == 0.0
    assert clock.unix_seconds(mono[0]) == 1_700_000_000
    wall[0] += hours * 3600 * NS
    assert clock.resync() == pytest.approx(hours * 3600 + 0.5)
    assert clock.unix_seconds(mono[0]) == pytest.approx(1_700_000_000.5 + hours * 3600)
    mono[0] += 60 * NS
    wall[0] += 60 * NS
    assert clock.resync() == 0.0
    assert clock.unix_seconds(mono[0]) - clock.unix_seconds(mono[0] - 60 * NS) == 60


@pytest.mark.parametrize("hours", [1, -1])
def test_the_ledger_and_the_report_of_a_run_whose_clock_jumps(hours, tmp_path):
    run_script(
        f"""
        import json, threading, time
        real, shift = time.time_ns, [0]
        time.time_ns = lambda: real() + shift[0]
        import telemetry
        began = time.perf_counter()
        agent = telemetry.start("run", run="r")
        list(telemetry.watch(list(range(10))))
        def until(condition):
            while not condition():
                threading.Event().wait(0.01)
        until(lambda: agent.accounts.stats.steps == 10)
        shift[0] = {hours} * 3600 * 10**9
        until(lambda: any("wall clock was stepped" in line["message"] for line in [{{"message": read()}}]))
        list(telemetry.watch(list(range(10))))
        telemetry.stop()
        with open("results.json", "w") as file:
            json.dump([time.perf_counter() - began, agent.accounts.ledger.wall_seconds], file)
        """.replace(
            "import telemetry\n", "import telemetry\n        read = lambda: agent.logbook.log.file.path.read_text()\n"
        ),
        tmp_path,
        env=environment(**QUIET),
    )
    took, wall = results(tmp_path)
    assert 0 < wall <= took
    (told,) = [line for line in events(tmp_path / "run", "error") if line["source"] == "clock"]
    assert f"stepped by {hours * 3600:.1f} s" in told["message"]
    summary = summarize(load(tmp_path / "run"))
    (rank,) = summary["ranks"]
    assert rank["steps"] == 20
    assert rank["wall_seconds"] == pytest.approx(wall, abs=1e-3)
    assert sum(rank["ledger"].values()) == pytest.approx(rank["wall_seconds"], abs=1e-4)
    for line in events(tmp_path / "run", "window"):
        assert 0 <= line["window_seconds"] <= took
        assert sum(line["ledger_seconds"].values()) == pytest.approx(line["window_seconds"], abs=1e-4)


# -- names -------------------------------------------------------------------------------------------------------

NAMES = {
    "parent folders": "../../../../etc/passwd",
    "absolute": "/etc/passwd",
    "newline": "two\nlines\r\nthree",
    "quotes": "a\"b'c`d",
    "backslash": "a\\b\\n\\",
    "label injection": 'x",rank="9"} 1\nevil_metric 2\n#',
    "json injection": '","event":"run_end","x":"',
    "10 kB": "x" * 10_000,
    "NUL": "nul\0b",
    "surrogate": "a\udcff\ud800b",
    "emoji": "\U0001f680 run \u202e rtl",
    "dots": "..",
    "spaces": " \t ",
    "control": "\x1b[31mred\x07",
    "format": "%s {0} $(id) ; rm -rf ~",
}


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """One process that runs an agent under each name, in the default folder."""
    outside = tmp_path_factory.mktemp("outside")
    folder = outside / "a" / "b"
    folder.mkdir(parents=True)
    done = run_script(
        f"""
        import json, os, telemetry, urllib.request
        found = {{}}
        for kind, name in {NAMES!r}.items():
            try:
                agent = telemetry.start(run=name)
            except telemetry.SettingError as error:
                found[kind] = {{"refused": str(error)}}
                continue
            list(telemetry.watch([1, 2, 3]))
            with telemetry.phase(name):
                agent._wake.wait(0.002)
            agent.faults.note("config", name)
            while agent.accounts.ledger.at_ns < agent.tracker.ring.words[0] or agent.accounts.stats.steps < 3:
                agent._wake.wait(0.01)
            with urllib.request.urlopen(agent.metrics_url) as page:
                page = page.read().decode()
            targets = [path.name for path in (agent.run_dir / "targets").iterdir()]
            telemetry.stop()
            found[kind] = {{"page": page, "run_dir": str(agent.run_dir), "targets": targets}}
        with open("results.json", "w") as file:
            json.dump(found, file)
        """,
        folder,
        env=environment(**QUIET),
    )
    return outside, done, results(folder)


@pytest.mark.parametrize("kind", NAMES)
def test_a_hostile_name_is_a_name_and_nothing_more(kind, named):
    outside, done, found = named
    assert (done.stdout, done.stderr) == ("", "")
    if kind == "spaces":
        assert "allowed is a text that is not empty" in found[kind]["refused"]
        return
    metrics = samples(found[kind]["page"])
    assert "evil_metric" not in metrics
    ((info, one),) = metrics["training_run_info"]
    assert one == 1
    assert info["rank"] == "0"
    assert 0 < len(info["run"]) <= 200
    assert info["run"].isprintable()

    run_dir = Path(found[kind]["run_dir"])
    assert run_dir.parent == outside / "a" / "b" / "telemetry-runs", "one folder, in the right place"
    lines = log_lines(run_dir)
    assert {line["run"] for line in lines} == {info["run"]}
    assert [line["event"] for line in lines if line["event"].startswith("run_")] == ["run_start", "run_end"]
    assert [line["category"] for line in lines if line["event"] == "phase"] == ["other"]
    assert summarize(load(run_dir))["run"] == info["run"]


def test_hostile_names_write_nothing_outside_the_run_folder(named):
    outside, _, found = named
    runs = {Path(answer["run_dir"]) for answer in found.values() if "run_dir" in answer}
    assert len(runs) == len(NAMES) - 1, "distinct names, distinct folders"
    files = [path for path in outside.rglob("*") if path.is_file()]
    allowed = {outside / "a" / "b" / name for name in ("script.py", "results.json")}
    for path in files:
        inside = [run for run in runs if path.is_relative_to(run)]
        assert inside or path in allowed, path
        assert (
            re.fullmatch(r"(logs/rank-0\.\d+\.jsonl|targets/[\w.-]+\.json)", str(path.relative_to(inside[0])))
            if (inside)
            else True
        )
    for answer in found.values():
        assert len(answer.get("targets", [""])) == 1


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({"RANK": "../1", "WORLD_SIZE": "2"}, 0),
        ({"RANK": "-5", "WORLD_SIZE": "x"}, 0),
        ({"RANK": "9" * 100, "WORLD_SIZE": "2"}, None),
        ({"NODE_NAME": 'a"\nb/../c', "TORCHELASTIC_RUN_ID": "../../up", "RANK": "3", "WORLD_SIZE": "4"}, 3),
        ({"SLURM_PROCID": "1", "SLURM_JOB_ID": "../7", "SLURM_JOB_NAME": "a\nb"}, 1),
    ],
)
def test_variables_of_a_launcher_that_make_no_sense(variables, rank, tmp_path):
    script = write(
        tmp_path,
        "s.py",
        """
        import telemetry, urllib.request
        agent = telemetry.start("run")
        assert list(telemetry.watch([1, 2])) == [1, 2]
        print(urllib.request.urlopen(agent.metrics_url).read().decode())
        """,
    )
    done = python(script, cwd=tmp_path, env=environment(**QUIET, **variables))
    assert (done.returncode, done.stderr) == (0, "")
    ((info, _),) = samples(done.stdout)["training_run_info"]
    if rank is not None:
        assert info["rank"] == str(rank)
        assert {line["rank"] for line in log_lines(tmp_path / "run")} == {rank}
    assert {p.relative_to(tmp_path).parts[0] for p in tmp_path.rglob("*")} == {"s.py", "run"}


# -- the script changes things around us -------------------------------------------------------------------------


def test_a_script_that_changes_its_folder_does_not_take_our_files_along(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    run_script(
        """
        import os, telemetry
        agent = telemetry.start("run", run="r", log_max_bytes=65536, targets_dir="targets")
        os.chdir("elsewhere")
        agent.logbook.log.file.forget()  # as after a full disk: the next line opens it again
        while not (agent.logbook.log.file.path.exists() and agent.logbook.log.file._file):
            agent._wake.wait(0.01)
        for _ in range(200):
            agent.logbook.emit("error", {"source": "test", "message": "x" * 1000})
        telemetry.stop()
        assert os.getcwd().endswith("elsewhere")
        """,
        tmp_path,
        env=environment(**QUIET),
    )
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert len(list((tmp_path / "run" / "logs").iterdir())) > 2, "it was rotated in its place"
    assert list((tmp_path / "targets").iterdir()) == []


def test_a_run_folder_that_is_removed_comes_back_with_the_next_file(tmp_path):
    run_script(
        """
        import os, shutil, sys, telemetry
        agent = telemetry.start("run", run="r", log_max_bytes=65536)
        os.rename("run", "gone")  # in one piece: the agent may be about to write a file into it
        shutil.rmtree("gone")
        for _ in range(100):
            agent.logbook.emit("error", {"source": "test", "message": "x" * 1000})
        assert list(telemetry.watch([1])) == [1]
        telemetry.stop()
        """,
        tmp_path,
        env=environment(**QUIET),
    )
    assert events(tmp_path / "run", "run_end")


def test_multiprocess_mode_of_prometheus_client_is_not_ours(tmp_path):
    """The variable turns metric objects into files, for a server with several processes."""
    (tmp_path / "multi").mkdir()
    env = environment(**QUIET, PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "multi"))
    with Child(write(tmp_path, "s.py", TRAINING), "run", cwd=tmp_path, env=env) as child:
        url = child.line()
        child.tell()
        wait_for(lambda: (value(fetch(url), "training_steps_total", rank="0", run="r") or 0) >= 99, "the right figures")
        assert not [labels for rows in samples(fetch(url)).values() for labels, _ in rows if "pid" in labels]
        child.tell("end")
        child.line()
        assert child.wait() == 0
        assert child.stderr == ""
    assert list((tmp_path / "multi").iterdir()) == []


# -- off, and wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["1", "true", "yes", "please"])
@pytest.mark.parametrize("how", ["start", "run"])
def test_disabled_leaves_nothing_of_us(said, how, tmp_path):
    source = """
        import os, sys, threading, telemetry
        before = list(sys.meta_path)
        agent = telemetry.start("run", interval_seconds="no number")
        assert agent.running is False and agent.metrics_url is None
        assert list(telemetry.watch([1, 2])) == [1, 2]
        thing = object()
        assert telemetry.watch(thing) is thing
        with telemetry.step(), telemetry.phase("evaluation"):
            pass
        telemetry.stop()
        heavy = ("telemetry.agent", "telemetry.attach", "telemetry.publish", "telemetry.collect", "structlog",
                 "prometheus_client", "psutil", "pynvml", "orjson")
        assert [name for name in sys.modules if name.startswith(heavy)] == []
        assert threading.active_count() == 1
        assert sys.meta_path == before
        import json
        """
    write(tmp_path, "script.py", source)
    prefix = () if how == "start" else ("-m", "telemetry", "run", "--run-dir", "run", "--port", "no port")
    done = python(*prefix, "script.py", cwd=tmp_path, env=environment(TELEMETRY_DISABLED=said, TELEMETRY_PORT="bad"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_disabled_patches_no_torch(tmp_path):
    run_script(
        """
        import sys, telemetry
        telemetry.start()
        import torch
        files = [f.__code__.co_filename for f in (torch.save, torch.utils.data.DataLoader.__iter__,
                 torch.utils.data.dataloader._BaseDataLoaderIter.__next__)]
        assert not [file for file in files if "telemetry" in file]
        assert not sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
        assert "telemetry.agent" not in sys.modules
        """,
        tmp_path,
        env=environment(TELEMETRY_DISABLED="1"),
    )


def test_disabled_0_is_enabled(tmp_path):
    done = run_script(
        "import telemetry\nassert telemetry.start('run').running", tmp_path, env=environment(TELEMETRY_DISABLED="0")
    )
    assert without_start_line(done.stderr) == ("", 1)


@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        (["--port", "70000"], {}, ["port", "'70000'", "0 for any free port, or off"]),
        ([], {"TELEMETRY_PORT": "http"}, ["port", "TELEMETRY_PORT", "'http'", "a port from 1 to 65535"]),
        (["--interval-seconds", "0"], {}, ["interval_seconds", "'0'", "from 0.1 to 3600"]),
        ([], {"TELEMETRY_INTERVAL_SECONDS": "nan"}, ["interval_seconds", "'nan'", "from 0.1"]),
        (["--gpu-events", "maybe"], {}, ["gpu_events", "'maybe'", "auto | on | off"]),
        (["--patch", "2"], {}, ["patch", "'2'", "true or false"]),
        (["--run-dir", ""], {}, ["run_dir", "''", "the path of a folder"]),
        (["--stall-enter-ratio", "0.1", "--stall-exit-ratio", "0.2"], {}, ["stall_exit_ratio", "0.2", "less than"]),
        ([], {"TELEMETRY_STEP_BUCKETS": "1,1"}, ["step_buckets", "'1,1'", "rising numbers"]),
        ([], {"TELEMETRY_RUN": " "}, ["run", "' '", "not empty"]),
        ([], {"TELEMETRY_PORT": "x" * 10_000}, ["port", "xxx...", "allowed is"]),
    ],
)
def test_a_bad_setting_is_one_clear_line_and_nothing_is_started(options, variables, said, tmp_path):
    write(tmp_path, "script.py", "print('started')")
    done = python("-m", "telemetry", "run", *options, "script.py", cwd=tmp_path, env=environment(**variables))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"telemetry: setting .+\n", done.stderr), done.stderr
    assert len(done.stderr) < 400
    assert [word for word in said if word not in done.stderr] == []
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_bad_setting_in_a_script_is_an_error_that_names_it(tmp_path):
    source = """
        import threading, telemetry
        for settings in ({"port": "http"}, {"intervall_seconds": 1}, {"run_dir": 3}):
            try:
                telemetry.start(**settings)
            except telemetry.SettingError as error:
                print(error)
        assert threading.active_count() == 1
        assert telemetry.start("run").running
        """
    done = python(write(tmp_path, "s.py", source), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    port, misspelt, folder = done.stdout.splitlines()
    assert "port = 'http'" in port
    assert "did you mean interval_seconds?" in misspelt
    assert "run_dir = 3" in folder


def test_an_unknown_variable_is_noted_in_the_log_only(tmp_path):
    env = environment(**QUIET, TELEMETRY_INTERVALL_SECONDS="3", TELEMETRY_OPTOUT="1")
    done = run_script("import telemetry\ntelemetry.start('run')\ntelemetry.stop()", tmp_path, env=env)
    assert (done.stdout, done.stderr) == ("", "")
    told = [line["message"] for line in events(tmp_path / "run", "error") if line["source"] == "config"]
    end = events(tmp_path / "run", "run_end")[0]
    assert told == [
        "TELEMETRY_INTERVALL_SECONDS is no setting of ours and was ignored; did you mean TELEMETRY_INTERVAL_SECONDS?",
        "TELEMETRY_OPTOUT is no setting of ours and was ignored",
    ]
    assert "config" not in end["errors_total"]


def test_no_file_descriptor_is_left(tmp_path):
    source = """
        import os, resource, telemetry
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        agent = telemetry.start("run", run="r")
        opened = []
        try:
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for _ in range(6000):
            if sum(agent.faults.counts.values()) > 3:
                break
            agent._wake.wait(0.01)
        assert list(telemetry.watch(list(range(10)))) == list(range(10))
        for each in opened:
            os.close(each)
        while agent.accounts.stats.steps < 10:
            agent._wake.wait(0.01)
        telemetry.stop()
        """
    script = write(tmp_path, "s.py", source)
    done = python(script, cwd=tmp_path, env=environment(**QUIET))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (end,) = events(tmp_path / "run", "run_end")
    assert end["steps_total"] == 10
