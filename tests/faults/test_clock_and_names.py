"""Wall clocks that jump and hostile names: the run goes on, and the reports stay true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from faults.processes import (
    environment,
    events,
    log_lines,
    python,
    results,
    run_script,
    samples,
    write,
)
from telemetry.report.logs import load
from telemetry.util.clock import NS, WallClock
from tests.faults.surroundings import QUIET
from tests.report_logs import summarize

# -- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [1, -1, 24 * 365 * 20])
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
        until(lambda: agent.accounting.stats.steps == 10)
        shift[0] = {hours} * 3600 * 10**9
        until(lambda: any("wall clock was stepped" in line["message"] for line in [{{"message": read()}}]))
        list(telemetry.watch(list(range(10))))
        telemetry.stop()
        with open("results.json", "w") as file:
            json.dump([time.perf_counter() - began, agent.accounting.ledger.wall_seconds], file)
        """.replace(
            "import telemetry\n", "import telemetry\n        read = lambda: agent.event_log.log.file.path.read_text()\n"
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
                agent._thread.join(0.002)
            agent.errors.note("config", name)
            while agent.accounting.ledger.at_ns < agent.tracker.ring.words[0] or agent.accounting.stats.steps < 3:
                agent._thread.join(0.01)
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
            re.fullmatch(
                r"(logs/rank-0\.\d+\.jsonl|targets/[\w.-]+\.json|attempts/(run|rank-0)\.json)",
                str(path.relative_to(inside[0])),
            )
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
