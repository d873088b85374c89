"""Compares what ``telemetry tune`` finds with an exhaustive grid, on scripts of the zoo, and under a memory limit.

    $ python -m tests.tune_campaign                 # all: about half an hour on an idle machine
    $ python -m tests.tune_campaign --only main-    # some
    $ python -m tests.tune_campaign --journal tune.jsonl --write    # go on where it was stopped; write the results

For each script: the grid, then tune, then the best of both in turn. The ratio comes from these last runs alone: the
fastest of many noisy trials looks faster than it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from telemetry.tune import command
from telemetry.tune.settings_grid import settings_grid
from telemetry.tune.trial_process import Launch
from telemetry.tune.trial_result import Settings
from telemetry.tune.tune_text import settings_text
from tests.zoo.processes import SCRIPTS
from tests.zoo.specimens import chosen

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAME = "tune-amd-epyc-2-cores"
CAPPED = ROOT / "tests" / "tune_scripts" / "hungry_workers.py"

GOAL = 0.95
MAX_TRIALS = 5

GRIDS = {
    "main-jpeg": ["num_workers=0,1,2,4"],
    "main-text": ["num_workers=0,1,2,4"],
    "main-mount": ["num_workers=0,2,4,8"],
    "main-tar": ["num_workers=0,1,2,4"],
    "cpu-audio": ["num_workers=0,1,2,4"],
    "cpu-database": ["num_workers=0,1,2,4"],
    "io-store": ["num_workers=0,2,4,8"],
    "io-zipped": ["num_workers=0,1,2,4"],
    "startup-fork": ["num_workers=0,1,2", "persistent_workers=False,True"],
    "healthy-fast-loader": ["num_workers=0,1,2,4"],
}
"""Ten specimens of the zoo, each with a script of its own, and the grid of each: small, for a machine with two cores."""


CAPS = {"memory-700": 700, "memory-1400": 1400}
"""Memory limits in MiB."""


@dataclass(frozen=True)
class Result:
    """One script. Rates are in steps per second; ``spread`` is the largest difference of two runs with equal settings."""

    name: str
    grid_best: str
    tune_best: str
    trials: int
    grid_rates: dict[str, float | None]
    before: float
    grid_rate: float
    tune_rate: float
    ratio: float
    spread: float


def measure(name: str, rounds: int, seconds: float, warm_up: float) -> Result:
    (specimen,) = chosen([name])
    if specimen.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: specimen.cores])
    script = str(SCRIPTS / f"{specimen.script}.py")
    launch = Launch(script, ("--seconds", "100000", *specimen.arguments))
    options = command.TuneOptions(launch, seconds=seconds, warm_up_seconds=warm_up, trials=MAX_TRIALS)
    with tempfile.TemporaryDirectory(prefix="tune-campaign-") as folder:
        (Path(folder) / "grid").mkdir()
        (Path(folder) / "tune").mkdir()
        whole = command.Tuning(options, Path(folder) / "grid", 20)
        first = whole.run(Settings())
        for settings in settings_grid(GRIDS[name]):
            if settings_text(settings.loader) != settings_text({k: first.settings.get(k) for k in settings.loader}):
                whole.run(settings)
        best_of_grid = max(whole.trials, key=lambda trial: trial.steps_per_second or 0.0)
        search = command.Tuning(options, Path(folder) / "tune", MAX_TRIALS)
        search.run(Settings())
        command.search_settings(search, MAX_TRIALS, [])
        best = command.simplest_of_the_best(search.trials)
        rates: dict[str, list[float]] = {"grid": [], "tune": []}
        same = best.wanted.key() == best_of_grid.wanted.key() or best.settings == best_of_grid.settings
        for number in range(rounds):
            pair = [("grid", best_of_grid), ("tune", best)]
            for which, trial in pair if number % 2 else reversed(pair):
                if not (same and which == "tune"):
                    rates[which].append(whole.run(trial.wanted).steps_per_second or 0.0)
    if same:
        rates["tune"] = rates["grid"]
    grid_rate, tune_rate = statistics.mean(rates["grid"]), statistics.mean(rates["tune"])
    return Result(
        name=name,
        grid_best=settings_text(best_of_grid.settings),
        tune_best=settings_text(best.settings),
        trials=len(search.trials),
        grid_rates={settings_text(trial.settings): trial.steps_per_second for trial in whole.trials},
        before=first.steps_per_second or 0.0,
        grid_rate=round(grid_rate, 3),
        tune_rate=round(tune_rate, 3),
        ratio=1.0 if same else round(tune_rate / grid_rate, 3),
        spread=round(max((max(r) - min(r)) / statistics.mean(r) for r in rates.values()), 3),
    )


def capped(megabytes: int) -> dict[str, object]:
    """Tune a script whose workers need much memory, in a cgroup with too little for many. Needs root."""
    group = memory_group(megabytes << 20)
    try:
        arguments = [sys.executable, "-m", "telemetry", "tune", "--json", "--seconds", "3", "--warm-up", "1"]
        found = subprocess.run(
            ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *arguments, str(CAPPED)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        killed = oom_kills(group)
    finally:
        remove_group(group)
    if found.returncode:
        raise SystemExit(f"tune ended with {found.returncode}: {found.stderr[-2000:]}")
    told = json.loads(found.stdout)
    return {
        "megabytes": megabytes,
        "oom_kills": killed,
        "best": settings_text(told["best"]["settings"]),
        "speedup": told["speedup"],
        "most_workers_tried": max(trial["settings"]["num_workers"] for trial in told["trials"]),
        "most_memory_bytes": max(trial["memory_bytes"] or 0 for trial in told["trials"]),
        "notes": told["notes"],
        "failed": [trial["failed"] for trial in told["trials"] if trial["failed"]],
    }


def memory_group(limit: int) -> Path:
    """A new cgroup with a memory limit, below this process's own.

    Raises:
        OSError: this process may not make one.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group, name = (
                Path("/sys/fs/cgroup/memory") / path.lstrip("/") / f"tune-{os.getpid()}",
                "memory.limit_in_bytes",
            )
            break
    else:
        path = Path("/proc/self/cgroup").read_text().split("::", 1)[1].strip()
        group, name = Path("/sys/fs/cgroup") / path.lstrip("/") / f"tune-{os.getpid()}", "memory.max"
    group.mkdir()
    try:
        (group / name).write_text(str(limit))
    except OSError:
        group.rmdir()
        raise
    return group


def remove_group(group: Path) -> None:
    """Remove a cgroup, whose last processes may take a moment to end."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.1)


def oom_kills(group: Path) -> int:
    """How many processes of the cgroup the kernel has killed for memory."""
    for name in ("memory.oom_control", "memory.events"):
        if (group / name).exists():
            fields = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(fields["oom_kill"])
    raise OSError("this cgroup does not count kills")


def page(results: list[Result], caps: list[dict[str, object]]) -> str:
    """The results as a page."""
    lines = [
        "# tune against an exhaustive grid, and under memory limits",
        "",
        "`python -m tests.tune_campaign`, on two shared cores of an AMD EPYC, without a GPU.",
        "",
        "## Grids",
        "",
    ]
    if results:
        lines += [
            "Rates are steps per second, measured in turn after the search. *Spread*: the largest difference of two runs",
            "with equal settings.",
            "",
            "| Script | Before | Best of the grid | steps/s | tune's choice | steps/s | Ratio | Trials | Spread |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
    for one in results:
        lines.append(
            f"| {one.name} | {one.before:.2f} | {one.grid_best} | {one.grid_rate:.2f} | {one.tune_best} | "
            f"{one.tune_rate:.2f} | {one.ratio:.2f} | {one.trials} | {100 * one.spread:.0f} % |"
        )
    good = sum(one.ratio >= GOAL for one in results)
    told = f"Within 5 % of the grid's best: {good} of {len(results)} scripts, in at most {MAX_TRIALS} trials each."
    lines += ["", told] if results else ["Not measured yet."]
    lines += ["", "## Memory limits", ""]
    if caps:
        lines += [
            "A script whose workers take 150 MB each, in a cgroup with a memory limit:",
            "",
            "| Limit | Killed for memory | Best that was found | Speed-up | Most workers tried | Most memory |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
    for cap in caps:
        lines.append(
            f"| {cap['megabytes']} MiB | {cap['oom_kills']} | {cap['best']} | {cap['speedup']:.2f} | "
            f"{cap['most_workers_tried']} | {cap['most_memory_bytes'] / 1e6:.0f} MB |"
        )
    return "\n".join(lines if caps else [*lines, "Not measured yet."]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="prefixes of names")
    parser.add_argument("--rounds", type=int, default=2, help="how often the best of both are run in turn")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured in a trial")
    parser.add_argument("--warm-up", type=float, default=2.0, help="not measured, in seconds")
    parser.add_argument("--journal", type=Path, help="results so far; scripts in it are not run again")
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results/")
    options = parser.parse_args()
    known = {}
    if options.journal is not None and options.journal.exists():
        known = {line["name"]: line for line in map(json.loads, options.journal.read_text().splitlines())}
    cores = os.sched_getaffinity(0)
    for name in [*GRIDS, *CAPS]:
        if name in known or not name.startswith(tuple(options.only)):
            continue
        os.sched_setaffinity(0, cores)
        if name in CAPS:
            found = {"name": name, **capped(CAPS[name])}
        else:
            found = asdict(measure(name, options.rounds, options.seconds, options.warm_up))
        known[name] = found
        print(json.dumps(found), flush=True)
        if options.journal is not None:
            with options.journal.open("a") as file:
                file.write(json.dumps(found) + "\n")
    caps = [known[name] for name in CAPS if name in known]
    results = [Result(**known[name]) for name in GRIDS if name in known]
    print(page(results, caps))
    if options.write:
        (RESULTS / f"{NAME}.json").write_text(json.dumps(list(known.values()), indent=1) + "\n")
        (RESULTS / f"{NAME}.md").write_text(page(results, caps))
    good = all(one.ratio >= GOAL for one in results) and not any(cap["oom_kills"] for cap in caps)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
