"""The place of this process in its job: run, rank, node and the scheduler's labels.

They come from the launcher's variables, or from torch.distributed.
"""

from __future__ import annotations

import itertools
import multiprocessing.process
import os
import re
import socket
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from time import gmtime, strftime
from typing import TYPE_CHECKING, Any, Final

from telemetry.safety.processes import process_started, start_ticks
from telemetry.util.clock import unix_time

if TYPE_CHECKING:
    from collections.abc import Mapping


# All ranks must use the same run name without communicating. So the name comes from variables that the launcher gives
# to all ranks. Only a process without a launcher makes up a name.

_MAX_NAME: Final = 200
_MAX_SLUG: Final = 64
MAX_RANK: Final = 1 << 24
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


_made_up = itertools.count(1)


@dataclass(slots=True)
class Identity:
    """The identity of this process in its job. The agent has one such record, and keeps it up to date.

    Attributes:
        run: name of the training job, the same on all of its ranks.
        rank: global rank, 0 for a single process.
        local_rank: rank on this node.
        world_size: number of ranks of the job.
        node: name of the machine.
        launcher: the source of these: ``torchrun``, ``slurm``, ``mpi``, ``lightning``, ``spawn``, ``kubernetes`` or
            ``plain``.
        rank_source: where the rank comes from: ``launcher``; ``torch.distributed``; ``default`` if neither gives one;
            ``assigned``, a free number, because another process of this node already uses this process's rank.
        claimed_rank: the rank that this process claims, even if it is shown under a free number.
    """

    run: str
    rank: int
    local_rank: int
    world_size: int
    node: str
    pid: int
    launcher: str
    rank_source: str = "launcher"
    claimed_rank: int = 0

    @property
    def rank_given(self) -> bool:
        """Whether a launcher or torch.distributed has given the rank."""
        return self.rank_source in {"launcher", "torch.distributed"}


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables in which a launcher passes the rank. ``world`` is empty if it passes no world size."""

    name: str
    rank: str
    world: str
    local: tuple[str, ...]
    needs_world: bool = False


_LAUNCHERS: Final = (
    # torchrun, accelerate, DeepSpeed, Ray Train: all that speak torch.distributed's env:// protocol.
    _Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), needs_world=True),
    # mpirun inside a Slurm job: Slurm's variables are those of mpirun's own daemon, so MPI's come first.
    _Launcher("mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",)),
    _Launcher("mpi", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",)),
    _Launcher("mpi", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"), True),
    _Launcher("mpi", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", ("JSM_NAMESPACE_LOCAL_RANK",)),
    _Launcher("slurm", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",)),
    _Launcher("mpi", "PMIX_RANK", "", ("PMIX_LOCAL_RANK", "MPI_LOCALRANKID")),
    _Launcher("mpi", "PMI_RANK", "", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")),
)


def identify(
    run: str | None, run_dir: Path | None, environ: Mapping[str, str] | None = None, *, node: str | None = None
) -> Identity:
    """Read the identity of this process.

    Args:
        run: the setting, which takes precedence over everything else.
        run_dir: the run folder. Its name is the run's name if no launcher gives one.
        environ: variables, ``os.environ`` by default.
        node: the setting; by default Slurm's or Kubernetes's name for the node, else the machine's.
    """
    env = os.environ if environ is None else environ
    launcher, rank, world, local_rank, rank_given = _place(env)
    job, folder = _job_name(env, launcher), run_dir.resolve().name if run_dir else ""
    # The id of a single-node torchrun is random. A reader learns more from the folder's name.
    name = run or (folder if _UUID.fullmatch(job) else job) or folder or job or _made_up_name(launcher, local_rank)
    return Identity(
        run=clean_name(name),
        rank=rank,
        local_rank=local_rank,
        world_size=world,
        node=clean_name(node or node_name(env)),
        pid=os.getpid(),
        launcher=launcher,
        rank_source="launcher" if rank_given else "default",
        claimed_rank=rank,
    )


def node_name(env: Mapping[str, str]) -> str:
    """This node's name in Slurm or Kubernetes, else the machine's."""
    return env.get("SLURMD_NODENAME") or env.get("NODE_NAME") or socket.gethostname() or "localhost"


def identity_from_torch(identity: Identity, seen: int | None) -> tuple[Identity, int | None]:
    """Read the identity from torch.distributed, once a default process group exists. Calls no collective.

    Called on the agent thread, so it only reads plain state and imports nothing. The adopted identity stays when the
    process group is destroyed.

    Args:
        identity: the identity so far.
        seen: number of the process group that was read last.

    Returns:
        The identity, unchanged if there is nothing new, and the number of the process group that was read.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    group: Any = getattr(distributed, "group", None)
    try:
        # Only its id is kept, and the group is read once: this thread must not drop the last reference.
        current = id(group.WORLD) if group is not None and distributed.is_initialized() else None
        if current is None or current == seen:
            return identity, current
        rank, world = int(distributed.get_rank()), int(distributed.get_world_size())
    except (AttributeError, ValueError, RuntimeError):  # torch is being imported, or the group was just destroyed
        return identity, None
    if not 0 <= rank < world or (identity.rank_given and world < identity.world_size):
        return identity, current  # a group of only some ranks: the launcher's numbers are the job's
    if identity.rank_given and (rank, world) == (identity.rank, identity.world_size):
        return identity, current
    local_rank = _whole(os.environ.get("LOCAL_RANK"))
    return replace(
        identity,
        rank=rank,
        world_size=world,
        local_rank=identity.local_rank if local_rank is None else local_rank,
        rank_source="torch.distributed",
    ), current


def clean_name(name: str) -> str:
    """Make a name safe as a label and in a log line: one line, printable, at most 200 characters."""
    text = "".join(c if c.isprintable() else " " for c in name[: 4 * _MAX_NAME])
    text = " ".join(text.split())
    # A lone surrogate (an undecodable byte of the environment) is not printable and has been removed above.
    return text[:_MAX_NAME] or "unnamed"


def slug(name: str) -> str:
    """Make a name safe as one path component. Distinct names stay distinct."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:_MAX_SLUG]
    if plain == name:
        return plain
    return f"{plain or 'run'}-{zlib.crc32(name.encode('utf-8', 'replace')):08x}"


def _place(env: Mapping[str, str]) -> tuple[str, int, int, int, bool]:
    """Launcher, rank, world size, local rank, and whether the rank was given to this very process."""
    child = multiprocessing.process.parent_process() is not None
    for launcher in _LAUNCHERS:
        rank = _whole(env.get(launcher.rank))
        if rank is None or (launcher.needs_world and launcher.world not in env):
            continue
        if child and launcher.rank != "RANK":
            break  # these variables belong to the process that spawned this one
        world = max(_whole(env.get(launcher.world)) or 1, rank + 1)
        local = next((n for name in launcher.local if (n := _whole(env.get(name))) is not None), 0)
        kubernetes = launcher.name == "torchrun" and "KUBERNETES_SERVICE_HOST" in env
        return "kubernetes" if kubernetes else launcher.name, rank, world, local, True
    index = _spawn_index() if child else None
    if index is not None:
        return "spawn", index, 1, index, False
    local_rank = _whole(env.get("LOCAL_RANK"))
    if local_rank is not None and not child:
        return _lightning(env, local_rank)
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in env else "plain", 0, 1, 0, False


def _lightning(env: Mapping[str, str], local_rank: int) -> tuple[str, int, int, int, bool]:
    """Lightning's launcher sets LOCAL_RANK, NODE_RANK and WORLD_SIZE, but no RANK."""
    node_rank = _whole(env.get("NODE_RANK")) or _whole(env.get("GROUP_RANK")) or 0
    world, on_node = _whole(env.get("WORLD_SIZE")) or 1, _whole(env.get("LOCAL_WORLD_SIZE"))
    nodes = _whole(env.get("NNODES")) or _whole(env.get("NUM_NODES"))
    if not on_node and nodes and world % nodes == 0:
        on_node = world // nodes
    if node_rank and not on_node:
        return "lightning", local_rank, 1, local_rank, False  # torch.distributed will give the rank
    rank = node_rank * (on_node or 0) + local_rank
    return "lightning", rank, max(world, rank + 1), local_rank, "WORLD_SIZE" in env


def _spawn_index() -> int | None:
    """The index of this child of ``torch.multiprocessing.spawn``; None if this process is not such a child."""
    process: Any = multiprocessing.process.current_process()
    arguments: Any = getattr(process, "_args", ())
    target = getattr(process, "_target", None)
    if getattr(target, "__module__", None) != "torch.multiprocessing.spawn" or len(arguments) < 2:
        return None
    return arguments[1] if isinstance(arguments[1], int) and 0 <= arguments[1] < MAX_RANK else None


def _whole(text: str | None) -> int | None:
    """A whole number that can be a rank or a count of ranks; None for anything else."""
    try:
        number = int(text) if text is not None else -1
    except ValueError:
        return None
    return number if 0 <= number <= MAX_RANK else None


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


def _made_up_name(launcher: str, local_rank: int) -> str:
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in {"", "-c", "-m"} else "python"
    spawned = multiprocessing.process.parent_process() is not None
    if launcher == "mpi" and os.environ.get("PMIX_NAMESPACE"):
        return f"{script}-{os.environ['PMIX_NAMESPACE']}"
    if "TORCHELASTIC_RUN_ID" in os.environ or launcher == "mpi":
        # All ranks of a node have the launcher as parent. So its pid and start make the same name on each of them.
        return f"{script}-{os.getppid()}-{start_ticks(os.getppid()) or 0}"
    # Lightning's rank 0 starts the others: the run has the name that rank 0 has made up.
    if spawned or (launcher == "lightning" and local_rank):
        return f"{script}-{_start_text(os.getppid())}-{os.getppid()}"
    number = next(_made_up)  # an agent that starts again in this process gets a new run
    return f"{script}-{_start_text(os.getpid())}-{os.getpid()}{f'-{number}' if number > 1 else ''}"


def _start_text(pid: int) -> str:
    """When a process started, in UTC. Every process that asks gets the same text."""
    return strftime("%Y%m%d-%H%M%S", gmtime(process_started(pid) or unix_time()))


def launch_of(environ: Mapping[str, str] | None = None) -> tuple[str, int | None]:
    """The launcher's process and its number of restarts, which distinguish the starts of a job on this node."""
    env = os.environ if environ is None else environ
    parent = os.getppid()
    counts = (_whole(env.get(name)) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return f"{parent}-{start_ticks(parent) or 0}", next((count for count in counts if count is not None), None)


# -- the scheduler's data on the job: its id, user, account and partition ----------------------------------------------

_VARIABLES: Final = {
    # The scheduler's own variables come first, then those that a pod or a script can set.
    "job": ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "JOB_NAME"),
    "user": ("SLURM_JOB_USER", "LSB_UNIXUSER", "PBS_O_LOGNAME", "USER", "LOGNAME"),
    "account": ("SLURM_JOB_ACCOUNT", "LSB_PROJECT_NAME", "PBS_ACCOUNT", "POD_NAMESPACE", "ACCOUNT"),
    "partition": ("SLURM_JOB_PARTITION", "LSB_QUEUE", "PBS_QUEUE", "QUEUE_NAME"),
}
"""By label: variables of Slurm, LSF, PBS, Kubernetes and the environment. The first that is set counts."""


def job_labels(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The job's labels; empty if no variable is set."""
    env = os.environ if environ is None else environ
    found = {}
    for label, names in _VARIABLES.items():
        value = next((env[name] for name in names if env.get(name)), "")
        found[label] = clean_name(value) if value else ""
    return found
