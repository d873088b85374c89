"""A fake NVIDIA driver below the real binding.

``install`` puts an object in the place of ``pynvml.nvmlLib``, the loaded ``libnvidia-ml.so.1``: everything above it,
the real ``pynvml`` included, runs as on a machine with GPUs. Tests change ``State`` at will; the driver looks at it
on every call. For a subprocess the state is a JSON file, read anew at each call: see ``subprocess_environment``.

    state = State(gpus=[Gpu(gpm=True)])
    with installed(state):
        ...
        state.gpus[0].utilization = 50
        state.errors["nvmlDeviceGetPowerUsage"] = NOT_SUPPORTED
        release = state.hang_in("nvmlDeviceGetPowerUsage")
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, fields
from pathlib import Path

from fakes.nvml_library import FakeLibrary
from fakes.nvml_state import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    STATE_VARIABLE,
    SUCCESS,
    UNINITIALIZED,
    UNKNOWN,
    Gpu,
    Mig,
    Process,
    State,
)

__all__ = [
    "DRIVER_NOT_LOADED",
    "FUNCTION_NOT_FOUND",
    "FakeLibrary",
    "GPU_IS_LOST",
    "Gpu",
    "INSUFFICIENT_SIZE",
    "INVALID_ARGUMENT",
    "Mig",
    "NOT_FOUND",
    "NOT_SUPPORTED",
    "NO_PERMISSION",
    "Process",
    "STATE_VARIABLE",
    "SUCCESS",
    "State",
    "UNINITIALIZED",
    "UNKNOWN",
    "install",
    "installed",
    "no_driver",
    "subprocess_environment",
    "write_state",
]


def install(state: State | str | os.PathLike) -> State:
    """Make the binding use the fake from now on. A path is a JSON state file, read again at each call."""
    import pynvml

    library = FakeLibrary(state) if isinstance(state, State) else _FileLibrary(Path(state))
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    return library.state


@contextlib.contextmanager
def installed(state: State):
    """The fake for the time of a test."""
    import pynvml

    before = pynvml.nvmlLib
    try:
        yield install(state)
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()


@contextlib.contextmanager
def no_driver():
    """A machine without ``libnvidia-ml.so.1``, whatever this one has."""
    import pynvml

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    before, loader = pynvml.nvmlLib, pynvml.CDLL
    pynvml.nvmlLib, pynvml.CDLL = None, missing
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield
    finally:
        pynvml.nvmlLib, pynvml.CDLL = before, loader
        pynvml._nvmlGetFunctionPointer_cache.clear()


class _FileLibrary(FakeLibrary):
    """Takes GPUs, errors and hangs from a file; what the driver saw stays in this process."""

    def __init__(self, path: Path) -> None:
        super().__init__(State())
        self._path = path
        self._hangs: list[str] = []
        self._text = ""

    def _call(self, function, args):
        self._reload()
        return super()._call(function, args)

    def _reload(self):
        text = self._path.read_text(encoding="utf-8")
        if text == self._text:  # keep the Gpu objects: GPM buffers remember theirs
            return
        content, self._text = json.loads(text), text
        gpus = [_gpu(gpu) for gpu in content.get("gpus", [{}])]
        if self._same_gpus(gpus):
            for old, new in zip(self.state.gpus, gpus):
                old.__dict__.update(new.__dict__)
        else:
            self.state.gpus = gpus
        self.state.errors = content.get("errors", {})
        self.state.driver_version = content.get("driver_version", self.state.driver_version)
        self._hangs = content.get("hang", [])

    def _same_gpus(self, gpus):
        return [gpu.uuid for gpu in gpus] == [gpu.uuid for gpu in self.state.gpus]

    def _hang(self, function):
        while function in self._hangs:
            time.sleep(0.02)
            self._reload()


def write_state(path: Path, state: State | None = None, *, hang: tuple[str, ...] = ()) -> None:
    """Write the JSON file that ``install`` reads. In one go, so that a reader never sees half of it."""
    state = state or State()
    content = {
        "gpus": [asdict(gpu) for gpu in state.gpus],
        "errors": state.errors,
        "driver_version": state.driver_version,
        "hang": list(hang),
    }
    whole = path.with_name(path.name + ".new")
    whole.write_text(json.dumps(content), encoding="utf-8")
    whole.replace(path)


def subprocess_environment(folder: Path, state: State | None = None, *, hang: tuple[str, ...] = ()) -> dict[str, str]:
    """Variables under which any Python started has the fake driver, its children too.

    ``folder`` gets the state file (rewrite it with ``write_state(folder / "nvml.json", …)``) and a ``sitecustomize``
    that installs the fake before the program begins.
    """
    path = folder / "nvml.json"
    write_state(path, state, hang=hang)
    tests = Path(__file__).resolve().parent.parent
    (folder / "sitecustomize.py").write_text(
        f"import os\nimport fakes.nvml\nfakes.nvml.install(os.environ[{STATE_VARIABLE!r}])\n",
        encoding="utf-8",
    )
    inherited = os.environ.get("PYTHONPATH")
    search = [str(folder), str(tests), *([inherited] if inherited else [])]
    return {"PYTHONPATH": os.pathsep.join(search), STATE_VARIABLE: str(path)}


def _gpu(content: dict) -> Gpu:
    known = {name.name for name in fields(Gpu)}
    gpu = Gpu(**{name: value for name, value in content.items() if name in known})
    gpu.gpm_values = {int(metric): value for metric, value in gpu.gpm_values.items()}
    gpu.gpm_returns = {int(metric): code for metric, code in gpu.gpm_returns.items()}
    gpu.processes = [Process(**process) for process in content.get("processes", [])]
    gpu.mig = [Mig(**mig) for mig in content.get("mig", [])]
    return gpu
