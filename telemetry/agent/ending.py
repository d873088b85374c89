"""How this process ends: by itself, by an exception or by an exit status; where, and what the exception means."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import Any, Final, NamedTuple

from telemetry.diagnosis.endings import FAILURES, GPU_MEMORY_FULL, SHARED_MEMORY_FULL
from telemetry.log.lines import ABSENT, GpuMemoryFull, RunEndLine
from telemetry.util.stacks import is_library, is_python

_MAX_TEXT: Final = 20_000
_MAX_CHAIN: Final = 8
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - only its size is read

_SIZES: Final = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SIZE: Final = r"(\d{1,9}(?:\.\d+)?) (bytes|[kmg]ib)"
_OUT_OF_MEMORY: Final = (
    f"tried to allocate {_SIZE}.*?total capacity of {_SIZE} of which {_SIZE} is free.*?of the allocated memory {_SIZE} "
    f"is allocated by pytorch.*?and {_SIZE} is reserved by pytorch but unallocated"
)
"""Matches the text of torch's exception, from torch 2.1 on."""

_PEER_LOST: Final = (
    r"connection (was )?(likely )?(closed|reset|refused|abort)|closed by peer|broken pipe|peer|socket closed|"
    r"nccl (communicator|error)|remote (process|server)|watchdog|time(d )?out|heartbeat"
)
"""Matches the text of torch.distributed's own exceptions."""

_GLOO_PEER_LOST: Final = (
    r"gloo/transport/\S+\.cc:\d+\].*(closed by peer|connection (reset|refused)|broken pipe|time(d )?out)"
)
"""Gloo raises plain exceptions, also out of ``backward()``. Their text contains the line of gloo's source."""


class EndEvidence:
    """What is known of how this process ends: an uncaught exception or an exit status.

    Python prints an uncaught exception, keeps it in `sys`, and only then calls the functions of `atexit`. So it is read
    there, and we need neither a hook nor a handler. Nothing keeps the exit status of ``sys.exit``: ``telemetry run``
    sees it pass. A process that executes another program is gone at once, as after a kill.

    ``process_ends``: whether the interpreter ends. False: only the agent ends.
    """

    def __init__(self) -> None:
        self._status: int | None = None
        self._left_at: str | None = None
        self._exception: BaseException | None = None
        self._settled: RunEndLine | None = None
        self.process_ends = False

    def leaving(self, code: object, error: BaseException | None = None) -> None:
        """Take the argument of ``sys.exit`` with which the script ends, and the exception that it raises."""
        # The kernel keeps the lowest byte: `sys.exit(256)` is a success.
        self._status = code & 0xFF if isinstance(code, int) else 0 if code is None else 1
        self._left_at = _own_line(error) if error is not None and self._status else None

    def at_exit(self) -> None:
        """Take the uncaught exception. Only `atexit` may call this: before that, `sys` may hold an older exception."""
        self.process_ends = True
        if not hasattr(sys, "ps1"):
            last: Any = getattr(sys, "last_value", None)
            self._exception = last if isinstance(last, BaseException) else None

    @property
    def settled(self) -> RunEndLine:
        """What the last line of the log has of it. Forgets the exception, whose frames keep objects of the script."""
        if self._settled is None:
            error, self._exception = self._exception, None
            failure = None if error is None else failure_of(error)
            shared_memory: Any = ABSENT
            gpu_memory = None if error is None or failure != GPU_MEMORY_FULL else _gpu_memory(error)
            if failure == SHARED_MEMORY_FULL:
                with suppress(OSError):
                    size = os.statvfs(_SHARED_MEMORY)
                    shared_memory = size.f_blocks * size.f_frsize
            self._settled = RunEndLine(
                exit_status=ABSENT if self._status is None else self._status,
                exception=ABSENT if error is None else type(error).__name__,
                exception_at=(self._left_at or ABSENT) if error is None else _own_line(error),
                failure=failure or ABSENT,
                shared_memory_bytes=shared_memory,
                gpu_memory=gpu_memory or ABSENT,
                lost_peer=ABSENT if error is None else _lost_peer(error),
            )
        return self._settled


_IN_WORKER: Final = re.compile(r"caught \w+ in (dataloader worker|pin memory|replica)", re.IGNORECASE)
_FRAME: Final = re.compile(r'\n  File "([^"\n]+)", line (\d+), in (\S+)')
"""torch raises a worker's exception again, with the traceback of the worker as its text."""


class _Frame(NamedTuple):
    """A frame of an exception. ``package``: the outermost package of its module."""

    file: str
    line: int
    function: str
    package: str = ""
    is_entry: bool = False

    @property
    def is_own(self) -> bool:
        """Whether it is the user's code."""
        return not self.is_entry and not is_library(self.file)


def _own_line(error: BaseException) -> str | None:
    """The innermost line of the user's code in an exception; None if there is none.

    Of an installed program it is the innermost line of the program's own package.
    """
    text = _text(error, as_it_is=True)
    if _IN_WORKER.match(text):
        inside = [_Frame(file, int(line), function) for file, line, function in _FRAME.findall(text)]
        own = [frame for frame in inside if frame.is_own]
        if own:
            return _named(own[-1])
    frames = _frames_of(error)
    own = [frame for frame in frames if frame.is_own]
    if not own:
        program = next((f.package for f in frames if f.package and not f.is_entry), "")
        own = [frame for frame in frames if frame.package == program and program]
    own = own or [frame for frame in frames if frame.is_entry]
    return _named(own[-1]) if own else None


def _named(frame: _Frame) -> str:
    return f"{frame.function} at {os.path.basename(frame.file)}:{frame.line}"  # noqa: PTH119 - text


def _frames_of(error: BaseException) -> list[_Frame]:
    """The frames of an exception without those of Python and telemetry, the outermost first."""
    found, trace = [], error.__traceback__
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals
        names = (module.get("__package__"), module.get("__name__"))
        package = next((name.partition(".")[0] for name in names if isinstance(name, str) and name), "")
        if not is_python(code.co_filename):
            # The file that pip writes for a command of a package: it is installed, and not the user's.
            entry = code.co_name == "<module>" and not code.co_filename.endswith(".py")
            entry = entry and {"sys", "argv", "exit"} <= {*code.co_names}
            found.append(_Frame(code.co_filename, trace.tb_lineno, code.co_name, package, entry))
        trace = trace.tb_next
    return found


def failure_of(error: BaseException) -> str | None:
    """What an exception means, see `FAILURES`. Its text is only matched, because it may hold anything."""
    chain = [
        (f"{type(each).__name__.lower()}: {_text(each)} in {_innermost(each)}", getattr(each, "errno", None))
        for each in _chain(error)
    ]
    for name, failure in FAILURES.items():
        if any(code in failure.errnos or re.search(failure.told, text, re.DOTALL) for text, code in chain):
            return name
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and those that it follows, as far as they may be of torch or of the system."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and len(found) < _MAX_CHAIN:
        if isinstance(each, (RuntimeError, MemoryError, OSError, EOFError)):
            found.append(each)
        each = each.__cause__ or each.__context__
    return found


def _innermost(error: BaseException) -> str:
    """The function that raised an exception."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_code.co_name


def _gpu_memory(error: BaseException) -> GpuMemoryFull | None:
    """The sizes in the text of torch's exception; None if it has no such text."""
    for each in _chain(error):
        found = re.search(_OUT_OF_MEMORY, _text(each), re.DOTALL)
        if found is not None:
            sizes = zip(found.groups()[::2], found.groups()[1::2], strict=True)
            return GpuMemoryFull(*(round(float(number) * _SIZES[unit]) for number, unit in sizes))
    return None


def _lost_peer(error: BaseException) -> bool:
    """Whether an exception means that another process of the job ended first.

    Only torch.distributed's exceptions are read: other ones may name any peer, such as a data set's server.
    """
    if type(error).__module__ == "torch.distributed":
        return bool(re.search(_PEER_LOST, _text(error)))
    return type(error) is RuntimeError and bool(re.search(_GLOO_PEER_LOST, _text(error), re.DOTALL))


def _text(error: BaseException, *, as_it_is: bool = False) -> str:
    try:
        text = str(error)[:_MAX_TEXT]
        return text if as_it_is else text.lower()
    except Exception:  # the script's own class may raise anything
        return ""
