#!/usr/bin/env bash
# Prints the verdict of a finished job in three lines: how it ended, where its GPU-hours went, and what to change.
#
# As a job's own epilog, at the end of the batch script, or for srun (the output is the job's):
#   srun --task-epilog=/opt/telemetry/epilog.sh …
# As Slurm's epilog of the controller (EpilogSlurmctld in slurm.conf), where stdout goes nowhere: write it to a file.
#
# SHARED_DIR and the run's name are those of train.sbatch. The report needs neither torch nor a GPU.
set -uo pipefail

run_dir="${1:-${SHARED_DIR:-${SLURM_SUBMIT_DIR:-.}}/runs/slurm-${SLURM_JOB_ID:-unknown}}"
[ "${SLURM_PROCID:-0}" = 0 ] || exit 0 # a task epilog runs for each task
[ -d "$run_dir/logs" ] || exit 0

# An epilog that fails drains the node, and one that hangs holds it: never do either.
timeout 60 telemetry report "$run_dir" --json 2>/dev/null | timeout 60 python3 -c '
import json, sys
from datetime import datetime


def unix(text):
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def rank_seconds(attempts, wall):
    """Each attempt counts with its own ranks, and so does the time till the next one. The newest has the rest."""
    total = 0.0
    for attempt, later in zip(attempts, attempts[1:]):
        began, next_began = unix(attempt["started"]), unix(later["started"])
        seconds = max(unix(attempt["ended"] or later["started"]), next_began) - began
        total += seconds * attempt["ranks"]
        wall -= seconds
    return total + max(0.0, wall) * attempts[-1]["ranks"]


try:
    report = json.load(sys.stdin)
    job = report["job"]
    attempts, goodput = job["attempts"], job["goodput"]
    seconds, hours = goodput["seconds"], rank_seconds(attempts, goodput["wall_seconds"]) / 3600
    ends = ", ".join("{} {}".format(n, e) for e in ("finished", "failed", "killed", "running")
                     if (n := sum(a["end"] == e for a in attempts)))
    least = goodput["wall_seconds"] / 200
    lost = sorted(((s, c) for c, s in seconds.items() if c != "productive" and s >= least), reverse=True)[:4]
    print("telemetry: run {}: {} attempt(s) ({}), {} steps lost".format(
        report["run"], len(attempts), ends, sum(a["lost_steps"] or 0 for a in attempts)))
    print("telemetry: {:.1f} GPU-hours, {:.0f} % productive; {}".format(
        hours, 100 * (goodput["goodput_ratio"] or 0),
        ", ".join("{} {:.0f} %".format(c.replace("_", " "), 100 * s / goodput["wall_seconds"]) for s, c in lost)))
    print("telemetry: " + report["verdict"].split(". ")[0].rstrip(".") + ".")
except Exception:
    pass
' || true
exit 0
