"""Protects existing files in a trial: an audit hook refuses what would overwrite, remove or rename one.

The hook sees each file that Python code opens for writing, before that happens. If the file was there before the trial,
it raises `ProtectedFileError`, and nothing happens to the file. Code in C or C++ that opens files itself is not seen,
and neither is another program.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Final

from telemetry.config import TRIAL_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

_SYSTEM: Final = ("/dev", "/proc", "/sys")
_CACHES: Final = frozenset({"__pycache__", ".cache", ".triton", ".nv", ".config"})
"""Folders that Python and libraries write to at any time. No script keeps results there."""

_TEMPORARY_SUFFIXES: Final = (".lock", ".pyc", ".pid")

_CHANGES: Final = {
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.rmdir": ((0, 1),),
    "os.truncate": ((0, None),),
    "shutil.rmtree": ((0, 1),),
}
"""Audit events that change a file. For each path: which argument it is, and which one is the folder that a relative
path is in. For `os.replace` the event is os.rename."""

_WRITES: Final = os.O_WRONLY | os.O_RDWR


class ProtectedFileError(PermissionError):
    """A trial was about to change a file that was there before."""


class FileGuard:
    """Decides which files a trial may change: those that it has made, and temporary ones.

    Args:
        free: folders and files that may be changed.
    """

    def __init__(self, free: Iterable[str]) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        others = (cache, tempfile.gettempdir(), os.environ.get("TORCHINDUCTOR_CACHE_DIR") or "/dev")
        self._free = tuple({real(os.path.expanduser(path)) for path in (*free, *_SYSTEM, *others)})  # noqa: PTH111
        self._made: set[str] = set()

    def install(self) -> None:
        """Watch this process, and those that it forks. It cannot be undone."""
        sys.addaudithook(self._hook)

    def protects(self, name: str) -> bool:
        """Whether a file (see `real`) was there before the trial and must stay as it is."""
        if name in self._made or name.endswith(_TEMPORARY_SUFFIXES) or _CACHES.intersection(name.split(os.sep)):  # noqa: PTH206
            return False
        if any(name == free or name.startswith(free + os.sep) for free in (*self._free, *self._made)):
            return False
        return os.path.lexists(name)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if flags & _WRITES and flags & (os.O_TRUNC | os.O_APPEND | os.O_CREAT):
                # A file that is only opened for writing is not changed by that: data is often mapped with "r+".
                self._check(path, changes=bool(flags & (os.O_TRUNC | os.O_APPEND)))
        elif event == "os.mkdir":
            self._check(arguments[0], changes=False)
        elif event in _CHANGES:
            for path_at, folder_at in _CHANGES[event]:
                given = folder_at is not None and folder_at < len(arguments)
                self._check(arguments[path_at], changes=True, folder=arguments[folder_at or 0] if given else None)

    def _check(self, path: Any, *, changes: bool, folder: Any = None) -> None:
        """Refuse the change of a protected file. One that is not there yet is the trial's own from now on."""
        if not isinstance(path, (str, bytes, os.PathLike)):  # a descriptor was checked when it was opened
            return
        if isinstance(folder, int) and folder >= 0:
            path = os.path.join(f"/proc/self/fd/{folder}", os.fsdecode(path))  # noqa: PTH118
        name = real(path)
        if not os.path.lexists(name):
            self._made.add(name)
        elif changes and self.protects(name):
            raise ProtectedFileError(
                f"telemetry tune: a trial must not change {name}, which was there before; allow it with --writable, "
                f"or let the script write elsewhere while {TRIAL_VARIABLE} is set"
            )


def real(path: Any) -> str:
    """The absolute path of a file, with links resolved, as text."""
    return os.path.realpath(os.fsdecode(path))
