"""Imports of ours beside a project that has modules of the same names, such as ``statistics.py`` or ``telemetry/``.

1. `begin`: from now on imports find the modules of Python and of packages, not those in the project's folders.
2. The caller imports all that the agent can ever need.
3. `end`: ``sys.path`` and the project's modules are back, and `step_aside` removes ours from ``sys.modules`` where the
   project has others of the same name. So the script imports its own.

Modules of ours keep what they have imported. So they import nothing later, and find nothing by its name.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import ModuleType

_path: list[str] | None = None  # sys.path as it was, from `begin` to `end`
_before: frozenset[str] = frozenset()  # names in sys.modules at `begin`
_theirs: Final[dict[str, ModuleType]] = {}  # modules of the project that were imported before, from `begin` to `end`
_ours: Final[list[str]] = []  # names of what was imported from `begin` to `end`
_aside: Final[list[ModuleType]] = []  # kept alive: a module in C may free what its functions use


def begin(*folders: str) -> None:
    """Find nothing of the project, which is in these folders. A second call adds folders."""
    global _path, _before
    if _path is None:
        _path, _before = sys.path[:], frozenset(sys.modules)
    project = {_real(folder) for folder in folders}
    sys.path[:] = sorted(sys.path, key=lambda entry: _real(entry) in project)  # last: we may be in there ourselves
    inside = tuple(os.path.join(folder, "") for folder in project)  # noqa: PTH118
    hidden = {name for name in _top_level(sys.modules) if _origin(name).startswith(inside) and _is_elsewhere(name)}
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden - {"telemetry"}]:
        _theirs[name] = sys.modules.pop(name)


def end() -> None:
    """Undo `begin`. Does nothing without it."""
    global _path
    if _path is not None:
        sys.path[:], _path = _path, None
        _ours[:] = [name for name in sys.modules if name not in _before or name in _theirs]
        step_aside()
        sys.modules.update(_theirs)
        _theirs.clear()


def step_aside(package: str = "") -> None:
    """Remove modules of ours, and this package, if ``sys.path`` as it is now has others of the same names."""
    names = [name for name in sys.modules if name in _ours or name.partition(".")[0] == package]
    shadowed = {name for name in _top_level(names) if _is_elsewhere(name)}
    for name in names:
        if name.partition(".")[0] in shadowed:
            _aside.append(sys.modules.pop(name))


def _top_level(names: Collection[str]) -> list[str]:
    return [name for name in names if "." not in name]


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except OSError:  # a relative path, and no working folder
        return path


def _origin(name: str) -> str:
    """The file of an imported module; empty if it has none."""
    spec = getattr(sys.modules[name], "__spec__", None)
    return _real(str(spec.origin)) if spec is not None and spec.has_location and spec.name == name else ""


def _is_elsewhere(name: str) -> bool:
    """Whether an import of a top-level module would now find another file than the imported one."""
    found = PathFinder.find_spec(name) if _origin(name) else None
    # A folder without __init__.py has no location. It does not hide a module.
    return found is not None and found.has_location and _real(str(found.origin)) != _origin(name)


# -- packages that a script must be able to import after us, as if for the first time ----------------------------------


def private(package: str, *modules: str, without: Collection[str] = ()) -> ModuleType:
    """Import a package in Python with these modules of it, for us alone, unless the script has imported it already.

    The script's own copy may read variables of the environment that the script sets before, and may be complete where
    ours is ``without`` other packages: these cannot be imported meanwhile on this thread.
    """
    is_theirs = package in sys.modules
    absent = _Absent(() if is_theirs else without)
    sys.meta_path.insert(0, absent)
    try:
        found = importlib.import_module(package)
        for name in modules:
            importlib.import_module(name)
    finally:
        sys.meta_path.remove(absent)
        for name in [name for name in sys.modules if name.partition(".")[0] == package and not is_theirs]:
            del sys.modules[name]
    return found


class _Absent(MetaPathFinder):
    """Hides packages from imports on the thread that made this. Another thread may import them right now."""

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages
        self._thread = threading.get_ident()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        del path, target
        if fullname.partition(".")[0] in self._packages and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
