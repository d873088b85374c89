"""Run a script or module in this process, as Python itself would.

The script sees no difference: it has its own ``__main__``, ``sys.argv`` and ``sys.path``, its exit code is kept, and
its tracebacks contain no frame of telemetry.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import io
import os
import re
import sys
import time
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from telemetry import api
from telemetry.safety import imports
from telemetry.safety.errors import say

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from telemetry.agent.agent import Agent
    from telemetry.api import InactiveAgent

_LAUNCHERS: Final = {
    "torchrun": "-m telemetry",
    "accelerate": "launch -m telemetry",
    "srun": "telemetry",
    "mpirun": "telemetry",
    "mpiexec": "telemetry",
}
"""Programs that start the ranks, and their options to start them with the agent."""


class LaunchError(Exception):
    """There is nothing to run; the text has the reason."""


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program. A ``with`` block in which its code is run gives the names of its fresh ``__main__``.

    The caller runs the code itself: whatever walks the stack, as autograd's anomaly mode does in each operator, pays
    for each frame below the script.
    """

    code: CodeType
    argv0: str
    file: str
    loader: Any
    spec: ModuleSpec | None

    def __enter__(self) -> dict[str, Any]:
        main = ModuleType("__main__")
        vars(main).update(
            __file__=self.file,
            __builtins__=builtins,
            __spec__=self.spec,
            __loader__=self.loader,
            __package__=self.spec.parent if self.spec else None,
            __cached__=self.spec.cached if self.spec else None,
        )
        sys.modules["__main__"] = main
        if "__mp_main__" in sys.modules:  # multiprocessing's second name for it: spawned workers send objects under it
            sys.modules["__mp_main__"] = main
        return vars(main)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SystemExit):
            api.leaving(error)
        elif trace is not None:
            _hide_frames_of(trace.tb_frame.f_code.co_filename)


def folder(target: str, *, module: bool) -> str:
    """The folder that Python would put first in ``sys.path`` for a script or a module; empty for none."""
    if module:
        return _working_folder() or ""
    path = Path(target)
    try:
        return str(path.resolve().parent)  # with links resolved
    except OSError:  # a relative path, and no working folder
        return str(path.parent)


def find(target: str, *, module: bool) -> Program:
    """Find and compile a script, or with ``module`` a module by its dotted name. Later imports are the program's.

    Raises:
        LaunchError: it is missing, or cannot be read.
        SyntaxError: it cannot be compiled; the error has file and line, like Python's own.
    """
    imports.end()
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # -P, -I: Python has put no folder there, and must not
        with_m = getattr(sys.modules.get("__main__"), "__spec__", None) is not None
        own = 0 if with_m and _working_folder() is None else 1  # then Python has put none there
        sys.path[:own] = filter(None, [folder(target, module=module)])
    imports.step_aside("telemetry")
    return _find_module(target) if module else _compiled(target)


def _compiled(target: str) -> Program:
    path = Path(target)
    if re.fullmatch(r"python[\d.]*", path.name):
        raise LaunchError(f"{target} is the interpreter, not a script: leave it out")
    if path.is_dir() or path.suffix in {".zip", ".pyz", ".pyc"}:
        raise LaunchError(f"{target} is not a Python script; for a package use -m")
    full = os.path.join(_working_folder() or "", target)  # noqa: PTH118 - absolute, not normalized: Python's __file__
    try:
        with io.open_code(full) as file:
            source = file.read()
    except OSError as error:
        started = _LAUNCHERS.get(path.name)
        hint = f"; {path.name} comes first: {path.name} ... {started} run SCRIPT" if started else ""
        raise LaunchError(f"cannot open {target}: {error.strerror or error}{hint}") from None
    try:
        code = compile(source, full, "exec", dont_inherit=True)
    except ValueError as error:
        raise LaunchError(f"{target} is not a Python script: {error}") from None
    return Program(code, target, full, SourceFileLoader("__main__", full), None)


def _find_module(target: str) -> Program:
    try:
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target}.__main__")
    except (ImportError, ValueError, AttributeError) as error:
        raise LaunchError(f"cannot find the module {target}: {error}") from None
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise LaunchError(f"there is no module {target} that can be run")
    file = spec.origin or target
    return Program(code, file, file, loader, spec)


def _working_folder() -> str | None:
    """The working folder, or None if it was removed. Python fails then only for a module or a relative path."""
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:
        return None


def _hide_frames_of(caller: str) -> None:
    """Remove our frames from the traceback that Python prints. ``caller``: the file whose code runs the program."""
    hook = sys.excepthook

    def without_ours(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        inner = trace
        while inner is not None and inner.tb_frame.f_code.co_filename != caller:
            inner = inner.tb_next
        shown = inner.tb_next if inner is not None and inner.tb_next is not None else trace
        hook(kind, error.with_traceback(shown), shown)

    sys.excepthook = without_ours


# -- the page of the run -----------------------------------------------------------------------------------------------

_PAGE_SECONDS: Final = 60.0
"""The end of the process waits at most this long for the page. Writing it then goes on in the background."""

_COMMAND: Final = """\
import sys
sys.path = [sys.argv.pop(1), *filter(None, sys.path)]
from telemetry.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The command of this package. The working folder, which may have modules of the same names, is not on its path."""


class PageAtExit:
    """Writes the page of the run at the exit of this process, on rank 0. Made before the agent, it comes after its end.

    Another process draws the page: nothing of it is imported here, and nothing that fails there comes here. It is not
    forked, which Python 3.12 and later refuse at the exit. A process that a signal kills writes no page.

    Attributes:
        agent: the agent of this process; None before it has started.
    """

    def __init__(self, file: str) -> None:
        self.agent: Agent | InactiveAgent | None = None
        self._file = os.path.abspath(file)  # noqa: PTH100 - the script may change its working folder
        self._pid = os.getpid()
        atexit.register(self._write)

    def _write(self) -> None:
        identity = None if self.agent is None else self.agent.identity
        if identity is None or identity.rank or os.getpid() != self._pid:
            return
        try:
            if self._draw() == 0:
                say(f"telemetry: the page of the run is {self._file}")
        except BaseException:
            pass  # a signal handler of the script, or no process can be started: Python would print our frames

    def _draw(self) -> int | None:
        """Run ``telemetry report``, which says on stderr what fails. Returns its status; None if it is not over."""
        package, run_dir = str(Path(__file__).parents[1]), str(self.agent and self.agent.run_dir)
        command = [sys.executable, "-c", _COMMAND, package, "report", run_dir, "--html", self._file]
        quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
        child = os.posix_spawn(sys.executable, command, os.environ, file_actions=quiet)
        deadline = time.monotonic() + _PAGE_SECONDS
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None
