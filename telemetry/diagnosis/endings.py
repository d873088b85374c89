"""How runs end: what an exception means, and what to do; one table of those with a known remedy."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from telemetry.model.records import XIDS, XIDS_OF_SCRIPTS
from telemetry.util.words import binary_size, byte_size, named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from telemetry.log.lines import GpuErrorLine, GpuMemoryFull, RunEndLine

FAULT_SECONDS: Final = 60.0
"""An error of the GPU that is older when its process ends is not the cause."""

INTERRUPT: Final = "KeyboardInterrupt"

# -- the table ---------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """What the exception that ended a process means.

    ``told``: matches the lower-case class and text of such an exception, and the function that raised it. ``errnos``:
    its error numbers. ``means``, ``advice``: in words.
    """

    told: str
    means: str
    advice: str = ""
    errnos: tuple[int, ...] = ()


SHARED_MEMORY_FULL: Final = "shared_memory_full"
LOADER_TIMEOUT: Final = "loader_timeout"
GPU_MEMORY_FULL: Final = "gpu_memory_full"

SHM: Final = "/dev/shm"  # noqa: S108 - only its name
_LESS_MEMORY: Final = "fewer DataLoader workers, or a smaller prefetch_factor"

FAILURES: Final[Mapping[str, Failure]] = MappingProxyType(
    {
        SHARED_MEMORY_FULL: Failure(
            r"killed by signal: bus error|(shared memory|/torch_\d+).*no space left on device",
            f"{SHM} was full, so that a worker could not put a batch there",
            "make it larger (docker run --shm-size), or use fewer DataLoader workers or a smaller prefetch_factor",
        ),
        "descriptors_used_up": Failure(
            r"too many open files|\d items of ancdata|^eoferror: .*in recvfds$",  # the last: it was the worker's
            "too many files were open, and each kept tensor of a DataLoader worker is one",
            "keep copies (.clone()) of the loader's tensors, and close files after use; or call "
            "torch.multiprocessing.set_sharing_strategy('file_system'), or raise the limit (ulimit -n)",
            (errno.EMFILE, errno.ENFILE),
        ),
        LOADER_TIMEOUT: Failure(
            r"dataloader timed out after", "a batch did not come within the timeout of the DataLoader"
        ),
        "worker_killed": Failure(
            r"dataloader worker \(pid.*killed by signal: killed",
            "a DataLoader worker was killed, as the OOM killer does",
            f"use less memory: {_LESS_MEMORY}",
        ),
        "worker_ended": Failure(
            r"dataloader worker \(pid.*(exited unexpectedly|killed by signal)",
            "a DataLoader worker has ended or crashed",
            "run it once with num_workers=0: then the data set fails in this process, with its own traceback",
        ),
        GPU_MEMORY_FULL: Failure(
            r"\b(cuda|hip|xpu) out of memory",
            "the memory of the GPU was full",
            "use a smaller batch (with gradient accumulation), mixed precision, or activation checkpointing",
        ),
        "device_assert": Failure(
            r"device-side assert triggered",
            "a kernel was given a wrong value, such as a label or an index that is out of range",
            "run it once on the CPU, or with CUDA_LAUNCH_BLOCKING=1: then the exception names the call",
        ),
        "memory_full": Failure(
            r"^_?(array)?memoryerror\b|(can't|cannot) allocate memory|defaultcpuallocator: not enough memory",
            "the machine, or the job's part of it, had no memory left",
            f"give the job more memory, or use less: a smaller batch, {_LESS_MEMORY}",
            (errno.ENOMEM,),
        ),
        "port_in_use": Failure(
            r"address already in use|eaddrinuse",
            "another process uses its network port",
            "end the process that has the port, often an earlier run, or take another port (MASTER_PORT, torchrun "
            "--master-port)",
            (errno.EADDRINUSE,),
        ),
        "disk_full": Failure(
            r"no space left on device|disk quota exceeded|pytorchstreamwriter failed writing",
            "the disk, or the quota on it, was full",
            "free space there or write to another disk, and keep fewer checkpoints",
            (errno.ENOSPC, errno.EDQUOT),
        ),
    }
)
"""The failures by their name in the log. Of several that match, the first counts."""


# -- one end -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run broke off.

    Attributes:
        ranks: the rank that failed first, or the ranks that were killed.
        process: the last line of the rank that failed; None if the ranks were killed.
        killed_by_oom: what the OOM killer did; empty if it did nothing.
        gpu_fault: the error that a GPU reported before, with its rank; None without one.
    """

    ranks: tuple[int, ...]
    process: RunEndLine | None
    killed_by_oom: str = ""
    gpu_fault: GpuErrorLine | None = None

    def in_words(self, *, several: bool, stepped: bool) -> EndInWords:
        """What a report says of it. ``several``: the job has several ranks. ``stepped``: a step had ended."""
        early = "" if stepped else ", before the first step"
        process, rank = self.process, f" on rank {self.ranks[0]}" if several and self.ranks else ""
        why = [_fault(self.gpu_fault, several=several)] if self.gpu_fault else []
        advice = [_fault_advice(self.gpu_fault)] if self.gpu_fault else []
        if self.killed_by_oom:
            advice.insert(0, f"raise the memory limit of its cgroup, or use less: {_LESS_MEMORY}")
        if process is None:
            itself = "itself" if len(self.ranks) == 1 else "themselves"
            killed = self.killed_by_oom or f"{named(self.ranks)} did not end by {itself}"
            return EndInWords(f"Killed: {killed}{early}.", tuple(why), advice[0] if advice else "")
        if self.killed_by_oom:
            why.insert(0, f"{self.killed_by_oom[:1].upper()}{self.killed_by_oom[1:]}.")
        at = f" in {process.exception_at}" if process.exception_at else ""
        if process.exception == INTERRUPT:
            return EndInWords(f"Interrupted{rank}: {INTERRUPT}{at}{early}.")
        if not process.exception:
            status = int(process.exit_status or 0)
            argument = ", as argparse does for a wrong argument" if status == _USAGE and not stepped else ""
            why.append(f"The script ended itself{argument}; what it printed says why.")
            return EndInWords(
                f"Failed{rank}: exit status {status}{at}{early}.", tuple(why), advice[0] if advice else ""
            )
        means, own = _meaning(process)
        advice += [own] if own else []
        sentence = f"Failed{rank}: {process.exception}{at}{early}{means and f': {means}'}."
        if process.failure == GPU_MEMORY_FULL and process.gpu_memory:
            why.insert(0, _full(process.gpu_memory))
        return EndInWords(sentence, tuple(why), advice[0] if advice else "")


class EndInWords(NamedTuple):
    """How a run ended: one sentence, further ones, and what to do; empty if nothing is known to help."""

    sentence: str
    why: tuple[str, ...] = ()
    advice: str = ""


_USAGE: Final = 2
"""The exit status of argparse, click and most programs after a wrong argument."""


def _meaning(process: RunEndLine) -> tuple[str, str]:
    """What an exception means and what to do; empty if it is not in the table."""
    failure = FAILURES.get(process.failure or "")
    if failure is None:
        return "", ""
    means, advice = failure.means, failure.advice
    if process.failure == SHARED_MEMORY_FULL and process.shared_memory_bytes:
        means = means.replace(SHM, f"{SHM} of {byte_size(process.shared_memory_bytes)}")
    memory = process.gpu_memory
    if process.failure == GPU_MEMORY_FULL and memory and memory.unallocated_bytes >= memory.tried_bytes:
        advice = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the reserved memory is in pieces"
    return means, advice


def _full(memory: GpuMemoryFull) -> str:
    """What filled the memory of the GPU."""
    tried, total, spare = map(binary_size, (memory.tried_bytes, memory.total_bytes, memory.unallocated_bytes))
    held = f"{binary_size(memory.allocated_bytes)} of {total} were allocated, and {spare} reserved but not allocated"
    return f"{tried} more did not fit; {held}."


def _fault(fault: GpuErrorLine, *, several: bool) -> str:
    """What a GPU reported before the end of its process."""
    gpu = "The GPU" if fault.gpu is None else f"GPU {fault.gpu}"
    rank = f" of rank {fault.rank}" if several else ""
    node = f" on node {fault.node}" if fault.node else ""
    means = f": {XIDS[fault.xid]}" if fault.xid in XIDS else ""
    return f"{gpu}{rank}{node} had reported Xid {fault.xid}{means}."


def _fault_advice(fault: GpuErrorLine) -> str:
    if fault.xid in XIDS_OF_SCRIPTS:
        return "run it with CUDA_LAUNCH_BLOCKING=1: then the exception names the call"
    return "have the node checked (nvidia-smi -q, dmesg) before it is used again"
