"""Who am I: run, rank, local rank and node, from torchrun, Slurm, Kubernetes or a plain process.

Every rank must come to the same run name without talking to the others; so a name is taken from what a launcher
gives all of them, and only a plain single process makes one up.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.records import Identity

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_NAME: Final = 200
_MAX_SLUG: Final = 64
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def identify(run: str | None, run_dir: Path | None, environ: Mapping[str, str] | None = None) -> Identity:
    """Read the identity of this process.

    Args:
        run: the setting, which wins over everything.
        run_dir: the run folder; its name is the run's when no launcher names one.
        environ: variables, ``os.environ`` by default.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun, and all that speak torch.distributed's env:// protocol
        launcher = "kubernetes" if "KUBERNETES_SERVICE_HOST" in env else "torchrun"
        rank, world = _int(env, "RANK", 0), _int(env, "WORLD_SIZE", 1)
        local_rank = _int(env, "LOCAL_RANK", 0)
    elif "SLURM_PROCID" in env:
        launcher = "slurm"
        rank, world = _int(env, "SLURM_PROCID", 0), _int(env, "SLURM_NTASKS", 1)
        local_rank = _int(env, "SLURM_LOCALID", 0)
    else:
        launcher = "kubernetes" if "KUBERNETES_SERVICE_HOST" in env else "plain"
        rank, world, local_rank = 0, 1, 0
    job, folder = _job_name(env, launcher), run_dir.resolve().name if run_dir else ""
    # A single-node torchrun draws a random id, which tells nobody anything: the folder's name is the better one.
    name = run or (folder if _UUID.fullmatch(job) else job) or folder or job or _made_up_name()
    return Identity(
        run=clean_name(name),
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        node=clean_name(env.get("SLURMD_NODENAME") or env.get("NODE_NAME") or socket.gethostname() or "localhost"),
        pid=os.getpid(),
        launcher=launcher,
    )


def clean_name(name: str) -> str:
    """A name that is safe as a label and in a log line: one line, printable, at most 200 characters."""
    text = "".join(c if c.isprintable() else " " for c in name[: 4 * _MAX_NAME])
    text = " ".join(text.split())
    # A lone surrogate (an undecodable byte of the environment) is not printable and is gone by now.
    return text[:_MAX_NAME] or "unnamed"


def slug(name: str) -> str:
    """A name that is safe as one path component, and distinct for distinct names."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:_MAX_SLUG]
    if plain == name:
        return plain
    return f"{plain or 'run'}-{zlib.crc32(name.encode('utf-8', 'replace')):08x}"


def _int(env: Mapping[str, str], variable: str, default: int) -> int:
    try:
        return max(0, int(env.get(variable, default)))
    except ValueError:
        return default


def _job_name(env: Mapping[str, str], launcher: str) -> str:
    if "SLURM_JOB_ID" in env:
        array = env.get("SLURM_ARRAY_JOB_ID")
        job = f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '0')}" if array else env["SLURM_JOB_ID"]
        return f"{env.get('SLURM_JOB_NAME', 'slurm')}-{job}"
    elastic = env.get("TORCHELASTIC_RUN_ID", "none")
    if elastic not in {"", "none"}:
        return elastic
    if launcher == "kubernetes":
        return env.get("JOB_NAME", "")
    return ""


def _made_up_name() -> str:
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in {"", "-c", "-m"} else "python"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # All ranks of a node have the launcher as parent: its pid and start name the run, the same for each of them.
        return f"{script}-{os.getppid()}-{_start_ticks(os.getppid())}"
    return f"{script}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"


def _start_ticks(pid: int) -> str:
    """Field 22 of /proc/PID/stat: clock ticks from boot to the start of the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"
