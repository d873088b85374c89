"""Lets a script go on in a trial without changing its files: nothing is saved, and writes go into a temporary file.

* Saving functions of torch do nothing. The file counts as written: it can be renamed and removed. What a script saves
  into memory is saved: it often loads it again.
* A file that exists and is opened with ``open(path, "w")`` or ``"a"`` is replaced by an empty temporary one, for this
  process and the workers that it forks.
* Renaming onto such a file, and removing it, does nothing.

What cannot be redirected is refused by `FileGuard`.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import pathlib
import shutil
from typing import TYPE_CHECKING, Any, Final

from telemetry.attach.trial_guard import real

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from telemetry.attach.trial_guard import FileGuard
    from telemetry.hooks.patching import Patches

SAVES: Final = {
    "torch": ("save",),
    "torch.serialization": ("save",),
    "torch.jit": ("save",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "safetensors.torch": ("save_file", "save_model"),
}
"""Saving functions, by module. They write files with code that an audit hook does not see."""

_NAMED: Final = ("checkpoint_id", "filename", "f")


class TrialFiles:
    """The files of a trial that exist only for the script.

    Args:
        guard: knows which files are protected.
        folder: for the temporary files.

    Attributes:
        saves: how often a saving function was called.
        redirected: protected files that the script has written to, and where that went.
    """

    def __init__(self, guard: FileGuard, folder: str) -> None:
        self._guard = guard
        self._folder = folder
        self._pretended: set[str] = set()
        self.saves = 0
        self.redirected: dict[str, str] = {}

    def patch_python(self, patches: Patches) -> None:
        """Patch `open`, and the functions of `os` that rename and remove."""
        patches.replace(builtins, "open", self._open)
        patches.replace(io, "open", self._open)
        for name in ("rename", "replace"):
            patches.replace(os, name, self._rename)
        for name in ("remove", "unlink"):
            patches.replace(os, name, self._remove)
        accessor = getattr(pathlib, "_NormalAccessor", None)
        if accessor is not None:  # Python 3.10: pathlib keeps the functions that it found when it was imported
            functions: dict[str, Any] = {"open": io.open, "unlink": os.unlink}
            functions |= {"rename": os.rename, "replace": os.replace}
            for name, function in functions.items():
                patches.put(accessor, name, staticmethod(function))

    def patch_saving(self, module: ModuleType, patches: Patches) -> None:
        """Patch the saving functions of one module of `SAVES`."""
        for name in SAVES[module.__name__]:
            if callable(vars(module).get(name)):
                patches.replace(module, name, self._save)

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: A001
            if isinstance(file, (str, bytes, os.PathLike)) and isinstance(mode, str):
                writes = mode.startswith(("w", "a"))
                if writes or self.redirected:  # a data set may open thousands of files to read
                    file = self._instead_of(file, writes=writes)
            return original(file, mode, *args, **kwargs)

        return open

    def _rename(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def rename(src: Any, dst: Any, **kwargs: Any) -> None:
            if any(value is not None for value in kwargs.values()):  # relative to an open folder
                original(src, dst, **kwargs)
                return
            source, target = real(src), real(dst)
            if source in self._pretended:
                self._pretended.discard(source)
                self._pretended.add(target)
                return
            source, target = self._instead_of(src, writes=False), self._instead_of(dst, writes=True)
            try:
                original(source, target)
            except OSError as error:
                if error.errno != errno.EXDEV or target is dst:
                    raise
                shutil.move(source, target)  # the temporary folder is on another file system

        return rename

    def _remove(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def remove(path: Any, **kwargs: Any) -> None:
            if any(value is not None for value in kwargs.values()):
                original(path, **kwargs)
                return
            name = real(path)
            if name in self._pretended:
                self._pretended.discard(name)
            elif name not in self.redirected and not self._guard.protects(name):
                original(path)

        return remove

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            targets = [*args[1:2], *(kwargs[name] for name in _NAMED if name in kwargs)]
            if any(isinstance(target, io.BytesIO) for target in targets):
                return original(*args, **kwargs)
            self.saves += 1
            self._pretended.update(real(target) for target in targets if isinstance(target, (str, os.PathLike)))
            return _completed() if original.__name__ == "async_save" else None

        return save

    def _instead_of(self, path: Any, *, writes: bool) -> Any:
        """The path of the temporary file, if this one is protected and was or will be written to."""
        name = real(path)
        if name not in self.redirected:
            if not writes or not self._guard.protects(name) or not os.path.isfile(name):  # noqa: PTH113
                return path
            self.redirected[name] = os.path.join(self._folder, f"{len(self.redirected)}-{os.path.basename(name)}")  # noqa: PTH118, PTH119
        return self.redirected[name]


def _completed() -> Any:
    """What async_save returns, of a checkpoint that is complete."""
    from concurrent.futures import Future

    future: Future[None] = Future()
    future.set_result(None)
    return future
