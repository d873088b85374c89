"""Compares what ``telemetry tune`` finds with an exhaustive grid, on scripts of the zoo.

    $ python -m tests.tune_campaign                 # all: about half an hour on an idle machine
    $ python -m tests.tune_campaign --only main-    # some
    $ python -m tests.tune_campaign --write         # write the results

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
from pathlib import Path

from telemetry.tune import settings_text
from tests.zoo.specimens import ALL

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAME = "tune-amd-epyc-2-cores"

GOAL = 0.95
ROUNDS = 2
"""How often the best of both are run in turn."""

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


def tuned(*command: str) -> dict:
    """What ``telemetry tune --json`` prints."""
    command = (sys.executable, "-m", "telemetry", "tune", "--json", *command)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if found.returncode:
        raise SystemExit(f"tune ended with {found.returncode}: {found.stderr[-2000:]}")
    return json.loads(found.stdout)


def measured(name: str) -> dict[str, object]:
    """One script. Rates are in steps per second; ``spread``: the largest difference of two runs with equal settings."""
    (specimen,) = (specimen for specimen in ALL if specimen.name == name)
    if specimen.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: specimen.cores])
    script = [str(specimen.script), "--seconds", "100000", *specimen.arguments]
    length = ["--seconds", "4", "--warm-up", "2"]
    whole = tuned(*length, "--grid", *GRIDS[name], *script)
    search = tuned(*length, *script)
    best = {
        "grid": max(whole["trials"], key=lambda trial: trial["steps_per_second"] or 0.0)["settings"],
        "tune": search["best"]["settings"],
    }
    rates: dict[str, list[float]] = {"grid": [], "tune": []}
    for number in range(ROUNDS):
        for which in ("grid", "tune") if number % 2 else ("tune", "grid"):
            if which == "grid" or best["tune"] != best["grid"]:
                grid = [f"{setting}={value}" for setting, value in best[which].items() if value is not None]
                rates[which].append(tuned(*length, "--grid", *grid, *script)["trials"][-1]["steps_per_second"] or 0.0)
    rates["tune"] = rates["tune"] or rates["grid"]
    grid_rate, tune_rate = statistics.mean(rates["grid"]), statistics.mean(rates["tune"])
    return {
        "name": name,
        "grid_best": settings_text(best["grid"]),
        "tune_best": settings_text(best["tune"]),
        "trials": len(search["trials"]),
        "grid_rates": {settings_text(trial["settings"]): trial["steps_per_second"] for trial in whole["trials"]},
        "before": whole["baseline"]["steps_per_second"],
        "grid_rate": round(grid_rate, 3),
        "tune_rate": round(tune_rate, 3),
        "ratio": round(tune_rate / grid_rate, 3),
        "spread": round(max((max(r) - min(r)) / statistics.mean(r) for r in rates.values()), 3),
    }


def page(results: list[dict]) -> str:
    """The results as a page."""
    good, most = sum(one["ratio"] >= GOAL for one in results), max(one["trials"] for one in results)
    lines = [
        "# tune against an exhaustive grid",
        "",
        "`python -m tests.tune_campaign`, on two shared cores of an AMD EPYC, without a GPU.",
        "",
        "Rates are steps per second, measured in turn after the search. *Spread*: the largest difference of two runs",
        "with equal settings.",
        "",
        "| Script | Before | Best of the grid | steps/s | tune's choice | steps/s | Ratio | Trials | Spread |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {one['name']} | {one['before']:.2f} | {one['grid_best']} | {one['grid_rate']:.2f} | {one['tune_best']} | "
            f"{one['tune_rate']:.2f} | {one['ratio']:.2f} | {one['trials']} | {100 * one['spread']:.0f} % |"
            for one in results
        ),
        "",
        f"Within 5 % of the grid's best: {good} of {len(results)} scripts, in at most {most} trials each.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="prefixes of names")
    parser.add_argument("--write", action="store_true", help="write the results into benchmarks/results/")
    options = parser.parse_args()
    cores = os.sched_getaffinity(0)
    results = []
    for name in GRIDS:
        if name.startswith(tuple(options.only)):
            os.sched_setaffinity(0, cores)
            results.append(measured(name))
            print(json.dumps(results[-1]), flush=True)
    print(page(results))
    if options.write:
        (RESULTS / f"{NAME}.json").write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / f"{NAME}.md").write_text(page(results))
    return 0 if all(one["ratio"] >= GOAL for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
