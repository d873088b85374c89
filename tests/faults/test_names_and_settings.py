"""Hostile names, clocks that jump, settings that are wrong or turn the agent off: the run goes on, and the reports stay true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from telemetry.util.clock import NS, WallClock
from tests.faults.processes import (
    RUN,
    Child,
    end_of,
    environment,
    events,
    fetch,
    log_lines,
    python,
    quiet,
    report,
    run,
    samples,
    told,
    value,
    wait_for,
    write,
)
from tests.faults.test_disks import TRAINS

# -- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [-1, 24 * 365 * 20])
def test_a_wall_clock_that_jumps_moves_timestamps_and_no_duration(hours):
    wall, mono = [1_700_000_000 * NS], [5 * NS]
    clock = WallClock(lambda: wall[0], lambda: mono[0])
    assert clock.iso() == "2023-11-14T22:13:20.000Z"
    wall[0] += NS // 2  # as NTP slews a clock: timestamps do not follow, so that they do not jitter
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
    source = """
        import sys, time
        real, shift = time.time_ns, [0]
        time.time_ns = lambda: real() + shift[0]
        import telemetry
        from tests.faults.inside import log_file, steps, tell, until
        began = time.perf_counter()
        telemetry.start("run", run="r")
        list(telemetry.watch(list(range(10))))
        until(lambda: steps() == 10)
        shift[0] = int(sys.argv[1]) * 3600 * 10**9
        until(lambda: "wall clock was stepped" in log_file().path.read_text())
        list(telemetry.watch(list(range(10))))
        telemetry.stop()
        tell(time.perf_counter() - began)
        """
    took = run(tmp_path, source, hours)
    (message,) = told(tmp_path / "run", "clock")
    assert f"stepped by {hours * 3600:.1f} s" in message
    (rank,) = report(tmp_path / "run")["ranks"]
    assert rank["steps"] == 20
    assert 0 < rank["wall_seconds"] <= took
    assert sum(rank["ledger"].values()) == pytest.approx(rank["wall_seconds"], abs=1e-4)
    for line in events(tmp_path / "run", "window"):
        assert 0 <= line["window_seconds"] <= took
        assert sum(line["ledger_seconds"].values()) == pytest.approx(line["window_seconds"], abs=1e-4)


# -- names ---------------------------------------------------------------------------------------------------------

NAMES = {
    "parent folders": "../../../../etc/passwd",
    "newline": "two\nlines\r\nthree",
    "label injection": 'x",rank="9"} 1\nevil_metric 2\n#',
    "json injection": '","event":"run_end","x":"',
    "10 kB": "x" * 10_000,
    "NUL": "nul\0b",
    "surrogate": "a\udcff\ud800b",
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
    source = f"""
        import telemetry, time
        from tests.faults.inside import page, steps, tell, until
        found = {{}}
        for kind, name in {NAMES!r}.items():
            try:
                agent = telemetry.start(run=name)
            except telemetry.SettingError as error:
                found[kind] = {{"refused": str(error)}}
                continue
            list(telemetry.watch([1, 2, 3]))
            with telemetry.phase(name):
                time.sleep(0.002)  # shorter ones are not logged
            agent.errors.note("config", name)
            until(lambda: steps() == 3)
            targets = [path.name for path in (agent.run_dir / "targets").iterdir()]
            found[kind] = {{"page": page(), "run_dir": str(agent.run_dir), "targets": targets}}
            telemetry.stop()
        tell(found)
        """
    return outside, run(folder, source)


@pytest.mark.parametrize("kind", NAMES)
def test_a_hostile_name_is_a_name_and_nothing_more(kind, named):
    outside, found = named
    if kind == "spaces":
        assert "allowed is a text that is not empty" in found[kind]["refused"]
        return
    metrics = samples(found[kind]["page"])
    assert "evil_metric" not in metrics
    ((info, one),) = metrics["training_run_info"]
    assert (one, info["rank"]) == (1, "0")
    assert 0 < len(info["run"]) <= 200
    assert info["run"].isprintable()

    run_dir = Path(found[kind]["run_dir"])
    assert run_dir.parent == outside / "a" / "b" / "telemetry-runs", "one folder, in the right place"
    lines = log_lines(run_dir)
    assert {line["run"] for line in lines} == {info["run"]}
    assert [line["event"] for line in lines if line["event"].startswith("run_")] == ["run_start", "run_end"]
    assert [line["category"] for line in lines if line["event"] == "phase"] == ["other"]
    assert report(run_dir)["run"] == info["run"]


def test_hostile_names_write_nothing_outside_the_run_folder(named):
    outside, found = named
    runs = {Path(answer["run_dir"]) for answer in found.values() if "run_dir" in answer}
    assert len(runs) == len(NAMES) - 1, "distinct names, distinct folders"
    ours = re.compile(r"(logs/rank-0\.\d+\.jsonl|targets/[\w.-]+\.json|attempts/(run|rank-0)\.json)")
    for path in outside.rglob("*"):
        inside = [each for each in runs if path.is_relative_to(each)]
        if path.is_file() and path.name not in {"script.py", "results.json"}:
            assert inside, path
            assert ours.fullmatch(str(path.relative_to(inside[0]))), path
    assert all(len(answer.get("targets", [""])) == 1 for answer in found.values())


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({"RANK": "../1", "WORLD_SIZE": "2"}, 0),
        ({"NODE_NAME": 'a"\nb/../c', "TORCHELASTIC_RUN_ID": "../../up", "RANK": "3", "WORLD_SIZE": "4"}, 3),
    ],
)
def test_variables_of_a_launcher_that_make_no_sense(variables, rank, tmp_path):
    source = """
        import telemetry
        from tests.faults.inside import page, tell
        telemetry.start("run")
        assert list(telemetry.watch([1, 2])) == [1, 2]
        tell(page())
        """
    ((info, _),) = samples(run(tmp_path, source, env=quiet(**variables)))["training_run_info"]
    assert info["rank"] == str(rank)
    assert {line["rank"] for line in log_lines(tmp_path / "run")} == {rank}
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "results.json", "run"}


# -- off -----------------------------------------------------------------------------------------------------------

OFF = """
    import os, sys, telemetry
    before = list(sys.meta_path)
    agent = telemetry.start("run", interval_seconds="no number")
    assert agent.running is False and agent.metrics_url is None
    assert list(telemetry.watch([1, 2])) == [1, 2]
    thing = object()
    assert telemetry.watch(thing) is thing
    with telemetry.step(), telemetry.phase("evaluation"):
        pass
    telemetry.stop()
    heavy = ("telemetry.agent.agent", "telemetry.seams.tracker", "telemetry.node", "telemetry.sources", "structlog",
             "prometheus_client", "psutil", "pynvml")
    assert [name for name in sys.modules if name.startswith(heavy)] == []
    assert ("msgspec" in sys.modules) is (sys.argv[1] == "run"), "the command has read its options"
    assert len(os.listdir("/proc/self/task")) == 1
    assert sys.meta_path == before
"""


@pytest.mark.parametrize("how", ["start", "run"])
def test_disabled_leaves_nothing_of_us(how, tmp_path):
    under = (*RUN, "--port", "no port") if how == "run" else ()
    run(tmp_path, OFF, how, under=under, env=environment(TELEMETRY_DISABLED="please", TELEMETRY_PORT="bad"))
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_disabled_patches_no_torch_and_0_is_enabled(tmp_path):
    source = """
        import sys, telemetry
        assert telemetry.start("run").running is (sys.argv[1] == "0")
        import torch
        files = [f.__code__.co_filename for f in (torch.save, torch.utils.data.DataLoader.__iter__,
                 torch.utils.data.dataloader._BaseDataLoaderIter.__next__)]
        patched = bool([file for file in files if "telemetry" in file])
        assert patched is bool(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks) is (sys.argv[1] == "0")
        assert ("telemetry.agent.agent" in sys.modules) is patched
        """
    for disabled in ("0", "1"):
        run(tmp_path, source, disabled, env=quiet(TELEMETRY_DISABLED=disabled))


@pytest.mark.parametrize("how", ["start", "run"])
def test_without_the_gil_the_script_trains_on_without_us(how, tmp_path):
    write(tmp_path, "sitecustomize.py", "import sys\nsys._is_gil_enabled = lambda: False")
    source = f"""
        import sys, telemetry
        if {how!r} == "start":
            assert telemetry.start("run").running is False
        for _ in range(2):
            print([*telemetry.watch(range(4))])
        assert "telemetry.agent.agent" not in sys.modules
        """
    done = python(
        *(RUN if how == "run" else ()), write(tmp_path, "s.py", source), cwd=tmp_path, env=quiet(path=tmp_path)
    )
    assert (done.returncode, done.stdout) == (0, "[0, 1, 2, 3]\n" * 2)
    (line,) = done.stderr.splitlines()  # a start that fails is always told
    assert line.startswith("telemetry: cannot start: Python's GIL is off")
    assert not (tmp_path / "run").exists()


# -- wrong ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        ([], {"TELEMETRY_PORT": "http"}, ["port", "TELEMETRY_PORT", "'http'", "a port from 1 to 65535"]),
        (["--gpu-events", "maybe"], {}, ["gpu_events", "'maybe'", "auto | on | off"]),
        (["--stall-enter-ratio", "0.1", "--stall-exit-ratio", "0.2"], {}, ["stall_exit_ratio", "0.2", "less than"]),
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


def test_an_unknown_variable_is_noted_in_the_log_only(tmp_path):
    env = quiet(TELEMETRY_INTERVALL_SECONDS="3", TELEMETRY_OPTOUT="1")
    run(tmp_path, "import telemetry\ntelemetry.start('run')\ntelemetry.stop()", env=env)
    assert told(tmp_path / "run", "config") == [
        "TELEMETRY_INTERVALL_SECONDS is no setting of ours and was ignored; did you mean TELEMETRY_INTERVAL_SECONDS?",
        "TELEMETRY_OPTOUT is no setting of ours and was ignored",
    ]
    assert "config" not in end_of(tmp_path / "run")["errors_total"]


def test_multiprocess_mode_of_prometheus_client_is_not_ours(tmp_path):
    """The variable turns metric objects into files, for servers with several processes."""
    (tmp_path / "multi").mkdir()
    with Child(TRAINS, "run", cwd=tmp_path, env=quiet(PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "multi"))) as child:
        url = child.line()
        child.tell()
        wait_for(lambda: (value(fetch(url), "training_steps_total", rank="0", run="r") or 0) >= 99, "the right figures")
        assert not [labels for rows in samples(fetch(url)).values() for labels, _ in rows if "pid" in labels]
        child.ask("end")
        child.ends()
    assert list((tmp_path / "multi").iterdir()) == []
