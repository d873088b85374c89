"""What tells one process from another with the same pid, and what kind of process this is."""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import threading
from pathlib import Path

from telemetry.core.filesystem import read_small


def start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot. With the pid it identifies the process. None if it has ended."""
    try:
        fields = read_small(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in {b"Z", b"X"}:
        return None
    return int(fields[19])


def pid_namespace() -> int:
    """Id of this process's pid namespace, 0 if not known. It differs between containers that share a disk."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def outer_uid() -> int:
    """The uid of this process outside of its user namespace: in a container without privileges, who started that.

    The same as inside, if there is no such namespace or the uid has none outside.
    """
    uid = os.getuid()
    try:
        lines = read_small("/proc/self/uid_map").splitlines()
    except OSError:
        return uid
    for line in lines:
        inside, outside, count = map(int, line.split())
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid


def process_name(pid: int) -> str:
    """A name of a process that no other process of this machine has ever had, whatever its clock says."""
    try:
        boot = read_small("/proc/sys/kernel/random/boot_id")[:8].decode("ascii", "replace")
    except OSError:
        boot = ""
    return f"{pid}/{boot}-{start_ticks(pid) or 0}"


def runs_without_gil() -> bool:
    """Whether threads of this process run Python at the same time. The ring between them relies on the GIL."""
    return not getattr(sys, "_is_gil_enabled", lambda: True)()  # from Python 3.13 on


def is_loader_worker() -> bool:
    """Whether this process is a DataLoader worker, or a spawned child that is importing its main module.

    A spawned child runs the script's top level again, which may contain an unguarded ``telemetry.start()``. For workers
    ``get_worker_info`` is not enough: if workers are threads, it reports the training process as a worker, too.
    """
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        return True
    worker = sys.modules.get("torch.utils.data._utils.worker")
    if worker is None or worker.get_worker_info() is None:
        return False
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "_worker_loop":
            return True
        frame = frame.f_back
    return False
