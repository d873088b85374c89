"""Checks of installed packages and of settings."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from typing import TYPE_CHECKING, Final

from telemetry._version import __version__
from telemetry.config import DISABLED_VARIABLE, ENV_PREFIX, disabled, unknown_variables
from telemetry.doctor.finding import ABSENT, OK, PROBLEM, CheckContext, Finding
from telemetry.util.processes import runs_without_gil

if TYPE_CHECKING:
    from collections.abc import Iterable

OLDEST_PYTHON: Final = (3, 10)
OLDEST_TORCH: Final = (2, 4)
NEEDED: Final = ("structlog", "psutil", "orjson", "msgspec", "prometheus-client", "nvidia-ml-py")


def check_enabled(place: CheckContext) -> Iterable[Finding]:
    """Whether telemetry is turned off."""
    del place
    if disabled():
        text = f"{DISABLED_VARIABLE}={os.environ[DISABLED_VARIABLE]} turns everything off; unset it"
        yield Finding(PROBLEM, "enabled", text)
    else:
        yield Finding(OK, "enabled", f"telemetry is on: {DISABLED_VARIABLE} is not set")


def check_settings(place: CheckContext) -> Iterable[Finding]:
    """Whether the settings are valid, and which variables name no setting."""
    ignored = unknown_variables()
    used = [name for name in sorted(os.environ) if name.startswith(ENV_PREFIX) and name not in ignored]
    used = [name for name in used if name != DISABLED_VARIABLE]
    if place.error is not None:
        yield Finding(PROBLEM, "settings", f"{place.error}. No run will start; the other checks use the defaults")
    else:
        yield Finding(OK, "settings", f"valid; set by environment variables: {', '.join(used) or 'none'}")
    if ignored:
        shown = [f"{name} (did you mean {close}?)" if close else name for name, close in ignored.items()]
        yield Finding(ABSENT, "settings", f"ignored, because they name no setting: {', '.join(shown)}")


def check_versions(place: CheckContext) -> Iterable[Finding]:
    """Whether the versions of Python and torch are supported."""
    del place
    python, torch = sys.version_info[:2], version_of("torch")
    text = f"python {platform.python_version()}, torch {torch or 'missing'}, telemetry {__version__}"
    if python < OLDEST_PYTHON:
        yield Finding(PROBLEM, "versions", f"{text}; use Python {_dotted(OLDEST_PYTHON)} or newer")
    elif runs_without_gil():
        yield Finding(PROBLEM, "versions", f"{text}; Python's GIL is off, and no run will start; set PYTHON_GIL=1")
    elif torch is None:
        yield Finding(PROBLEM, "versions", f"{text}; run pip install torch")
    elif _release(torch) < OLDEST_TORCH:
        yield Finding(PROBLEM, "versions", f"{text}; use torch {_dotted(OLDEST_TORCH)} or newer")
    else:
        yield Finding(OK, "versions", text)


def check_packages(place: CheckContext) -> Iterable[Finding]:
    """Whether the packages that the agent needs are installed, and no conflicting package is."""
    del place
    found = {package: version_of(package) for package in NEEDED}
    missing = [package for package, version in found.items() if version is None]
    if missing:
        yield Finding(PROBLEM, "packages", f"missing: {', '.join(missing)}; run pip install {' '.join(missing)}")
    else:
        yield Finding(OK, "packages", ", ".join(f"{package} {version}" for package, version in found.items()))
    deprecated = version_of("pynvml")
    if deprecated is not None and _release(deprecated) < (12, 0):  # it contains a module of the same name
        text = f"pynvml {deprecated} overwrites nvidia-ml-py; run pip uninstall pynvml, then reinstall nvidia-ml-py"
        yield Finding(PROBLEM, "packages", text)


def version_of(package: str) -> str | None:
    """The version of an installed package, without importing it, which can take seconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Some distributions ship torch without its metadata.
        return "of unknown version" if importlib.util.find_spec(package.replace("-", "_")) else None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version. A version without numbers counts as new enough."""
    numbers = [part for part in version.split(".")[:2] if part.isdecimal()]
    return tuple(int(number) for number in numbers) if len(numbers) == 2 else (sys.maxsize,)
