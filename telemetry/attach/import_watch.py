"""Calls a function when a module has been imported, without importing it.

Under ``telemetry run`` the script has not imported torch yet. The script must import torch itself: before that, it may
set variables that torch reads while it loads (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ImportWatch(MetaPathFinder):
    """Calls back once for each watched module: at once if it is already imported, else when it has been imported.

    It is in ``sys.meta_path`` only while it waits for a module.

    Args:
        on_error: called with what a callback raises.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._waiting: dict[str, Callable[[ModuleType], None]] = {}
        self._on_error = on_error
        self._searching: set[tuple[int, str]] = set()  # threads, and the module that each looks for

    def when_imported(self, name: str, then: Callable[[ModuleType], None]) -> None:
        """Call ``then(module)``. An exception in it goes to ``on_error`` and does not fail the import."""
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            self._call(then, module)
            return
        self._waiting[name] = then
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def close(self) -> None:
        """Stop watching."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' spec for a watched module, with a loader that calls back; None for any other module."""
        del path, target
        # For this thread and this module only. CPython calls one finder at a time, but does not guarantee it.
        search = (get_ident(), fullname)
        if fullname not in self._waiting or search in self._searching:
            return None
        self._searching.add(search)
        try:
            spec = importlib.util.find_spec(fullname)
        except (ImportError, AttributeError, ValueError):
            return None  # the other finders will raise the reason
        finally:
            self._searching.discard(search)
        if spec is None or spec.loader is None:
            return None
        # It stays watched: a caller that asks for a spec may not import the module.
        spec.loader = _Announcing(spec.loader, lambda module: self._imported(fullname, module))
        return spec

    def _imported(self, name: str, module: ModuleType) -> None:
        then = self._waiting.pop(name, None)
        if then is not None:
            self._call(then, module)
        if not self._waiting:
            self.close()

    def _call(self, then: Callable[[ModuleType], None], module: ModuleType) -> None:
        try:
            then(module)
        except Exception as error:
            self._on_error(error)


class _Announcing(Loader):
    """The real loader, with a call after the import. It removes itself before the module's code runs."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)
