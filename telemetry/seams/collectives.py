"""The collective that this process is in: by the stack of a thread, and by torch's flight recorder.

The recorder keeps the newest collectives of a process in a ring. From torch 2.11 on it is on for NCCL and for gloo. The
variable TORCH_FR_BUFFER_SIZE (before: TORCH_NCCL_TRACE_BUFFER_SIZE) is its size, and 0 turns it off. It is read only
while the job hangs, and never turned on or off here. By torch's sources, another thread can safely do this:

* The state of the process groups (newest collective entered, newest completed) takes 0.04 ms and one short lock.
* The list of the collectives is read for gloo only. For NCCL it asks CUDA for the state of events, with the GIL held: a
  driver that hangs would then stop the whole process. 2,000 collectives take 0.05 s, with the GIL held.
* Python stacks are never requested, because that can wait for the GIL.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from telemetry.model.records import Collective
from telemetry.seams.device import cuda

if TYPE_CHECKING:
    from telemetry.util.stacks import Stack

# -- by a stack --------------------------------------------------------------------------------------------------------

_DISTRIBUTED: Final = f"{os.sep}torch{os.sep}distributed{os.sep}"
_NO_WAITING: Final = tuple(f"{_DISTRIBUTED}{part}{os.sep}" for part in ("checkpoint", "elastic", "rpc"))
_DDP: Final = f"{os.sep}torch{os.sep}nn{os.sep}parallel{os.sep}distributed.py"
_BACKWARD: Final = f"{os.sep}torch{os.sep}autograd{os.sep}graph.py"
_WRAPPERS: Final = frozenset({"wrapper", "inner", "_fn", "<lambda>"})


def collective_in(stack: Stack) -> str | None:
    """The collective that a thread is in, by its innermost frames; empty for a backward pass or DDP, else None.

    A backward pass may also compute.
    """
    file = stack[0].file if stack else ""
    if file.endswith((_BACKWARD, _DDP)):
        return ""
    if _DISTRIBUTED not in file or any(part in file for part in _NO_WAITING):
        return None
    inner = [spot for spot in stack if _DISTRIBUTED in spot.file]
    return next((spot.function for spot in inner if spot.function not in _WRAPPERS), "")


def in_backward(stack: Stack) -> bool:
    """Whether the innermost frame is the backward pass, which may wait for other ranks or compute."""
    return bool(stack) and stack[0].file.endswith(_BACKWARD)


# -- by torch's recorder -----------------------------------------------------------------------------------------------

_ENTRY: Final = re.compile(rb'\{[^{}]*"retired":false[^{}]*\}')
"""Matches collectives that have not ended. An entry contains no other object."""


@dataclass(frozen=True, slots=True)
class RecordedCollectives:
    """The state of this process's collectives.

    Attributes:
        newest: the one that the others may not have entered: the oldest that has not ended, else the newest; None
            without any.
        pending: whether it has not ended; None if unknown.
        off: whether the recorder is off, although this torch has one for the backend in use.
    """

    newest: Collective | None
    pending: bool | None
    off: bool = False


@dataclass(frozen=True, slots=True)
class Awaited:
    """Whether a rank that stands still waits for other ranks, and in which collective, as far as it is known.

    ``recorder_is_off``: see `RecordedCollectives`.
    """

    waits: bool
    collective: Collective | None
    recorder_is_off: bool


def awaited(stack: Stack, state: str, *, fetching: bool) -> Awaited:
    """What the training thread awaits of other ranks. It should stand still: reading takes up to 0.05 s.

    Args:
        stack: of the thread.
        state: its state in words, see `thread_state`.
        fetching: whether it is in a fetch. Then a collective in progress on the GPU is not what it waits for.
    """
    recorded, called = recorded_collectives(), collective_in(stack)
    pending, newest = (None, None) if recorded is None else (recorded.pending, recorded.newest)
    waits = called is not None
    if in_backward(stack):  # it computes, unless a collective is pending or the thread is off the CPU
        waits = pending if pending is not None else not state.startswith("running")
    elif pending and not fetching:
        waits = True  # a collective on the GPU: the thread itself may be anywhere
    if waits and called and (newest is None or not newest.name):
        newest = structs.replace(newest or Collective(""), name=called)
    return Awaited(waits, newest if waits else None, recorded is not None and recorded.off)


def recorded_collectives() -> RecordedCollectives | None:
    """The current state; None if torch.distributed is not in use, or torch fails.

    It imports nothing: it looks at modules that the script has imported.
    """
    dist, c10d = sys.modules.get("torch.distributed"), sys.modules.get("torch._C._distributed_c10d")
    try:
        if dist is None or c10d is None or not dist.is_available() or not dist.is_initialized():
            return None
        on_cuda = _on_cuda(dist)
        dump = getattr(c10d, "_dump_nccl_trace_json" if on_cuda else "_dump_fr_trace_json", None)
        if dump is None:
            return RecordedCollectives(_counted(dist), None)
        status = json.loads(dump(False, False)).get("pg_status")
        if not status:
            return RecordedCollectives(_counted(dist), None, off=True)
        groups = [(name, _number(each, "enqueued"), _number(each, "completed")) for name, each in status.items()]
        entered = [(name, enqueued, done) for name, enqueued, done in groups if enqueued > 0]
        if not entered:
            return RecordedCollectives(None, pending=False)
        waiting = [group for group in entered if group[1] > group[2]]
        name, number, done = max(waiting or entered, key=lambda group: group[1])
        newest = Collective("", min(done + 1, number) if waiting and done >= 0 else number, name)
        if waiting and not on_cuda:
            found = _ENTRY.search(dump(True, False))
            newest = _collective(json.loads(found.group())) if found else newest
        return RecordedCollectives(newest, bool(waiting))
    except Exception:  # torch's private functions may change or refuse
        return None


def _collective(entry: dict[str, Any]) -> Collective:
    name = str(entry["profiling_name"]).rpartition(":")[2]
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    sizes, types = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    shapes = [f"{'x'.join(map(str, size)) or 'scalar'} {kind}" for size, kind in zip(sizes, types, strict=False)]
    more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
    return Collective(name, int(number), str(entry["process_group"][0]), f"{shapes[0]}{more}" if shapes else "")


def _on_cuda(dist: Any) -> bool:
    """Whether the collectives are NCCL's. If the script names no backend, there is one for each kind of device."""
    backends = str(dist.get_backend_config())  # such as ``cpu:gloo,cuda:nccl``; ``get_backend`` then says "undefined"
    return "nccl" in backends and ("gloo" not in backends or cuda() is not None)


def _number(status: dict[str, Any], which: str) -> int:
    return int(status.get(f"last_{which}_collective", -1))


def _counted(dist: Any) -> Collective | None:
    """The number of the default group's newest collective, which torch counts without a recorder."""
    count = getattr(dist.group.WORLD, "_get_sequence_number_for_group", None)
    number = int(count()) if count is not None else 0
    return Collective("", number) if number > 0 else None
