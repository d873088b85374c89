"""Make every check, and show what they found."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from telemetry.config import Config, SettingError
from telemetry.doctor import gpu, installed, kernel, places
from telemetry.doctor.finding import PROBLEM, Finding, Place
from telemetry.terminal import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

WIDTH: Final = 100
HEIGHT: Final = 24
"""A screen: whatever is found fits into it."""

_NAME_WIDTH: Final = 11

CHECKS: Final[tuple[Callable[[Place], Iterable[Finding]], ...]] = (
    installed.check_enabled,
    installed.check_settings,
    installed.check_versions,
    installed.check_packages,
    gpu.check_gpu,
    gpu.check_cuda_events,
    places.check_endpoint,
    places.check_run_folder,
    places.check_board,
    kernel.check_workers,
    kernel.check_schedstat,
    kernel.check_pressure,
    kernel.check_cgroup,
)
"""In the order in which they are shown. `gpu.check_cuda_events` relies on what `gpu.check_gpu` has noted."""


def doctor(run_dir: str | None) -> int:
    """Print the findings. Returns 1 where something is a problem, else 0."""
    findings = examine(run_dir)
    show(render(findings) + "\n")
    return int(any(finding.status == PROBLEM for finding in findings))


def examine(run_dir: str | None) -> list[Finding]:
    """Make every check.

    Args:
        run_dir: the folder one means to use; that of the settings by default.
    """
    given = {} if run_dir is None else {"run_dir": run_dir}
    try:
        place = Place(Config.load(given))
    except SettingError as error:
        folder = given if _valid(given) else {}
        place = Place(Config.load(folder, environ={}), error)
    return [finding for check in CHECKS for finding in _contained(check, place)]


def render(findings: Sequence[Finding]) -> str:
    """The findings as lines that fit a screen: problems in two lines at most, or one where there are many."""
    problems = sum(finding.status == PROBLEM for finding in findings)
    verdict = (
        "everything that is needed works" if not problems else f"{problems} problem{'s' * (problems != 1)}, see !!"
    )
    last = f"{verdict}; -- is absent and does no harm"
    for most in (2, 1):
        lines = [line for finding in findings for line in _lines(finding, most)]
        if len(lines) < HEIGHT:
            break
    return "\n".join([*lines[: HEIGHT - 1], last])


def _lines(finding: Finding, most: int) -> list[str]:
    text = " ".join(finding.text.split())  # an error of others may have several lines
    first = f"{finding.status} {finding.name:<{_NAME_WIDTH}} "
    width = WIDTH - len(first)
    wrapped = textwrap.wrap(text, width, max_lines=most, placeholder=" ...") or [""]
    return [(" " * len(first) if number else first) + line for number, line in enumerate(wrapped)]


def _valid(given: dict[str, str]) -> bool:
    try:
        Config.load(given, environ={})
    except SettingError:
        return False
    return True


def _contained(check: Callable[[Place], Iterable[Finding]], place: Place) -> list[Finding]:
    """Run a check; whatever it raises becomes its finding."""
    try:
        return list(check(place))
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return [Finding(PROBLEM, name, f"the check itself failed: {type(error).__name__}: {error}")]
