"""Run all checks and print what they found."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from telemetry.config import Config, SettingError
from telemetry.doctor import folder_checks, gpu_checks, kernel_checks, package_checks
from telemetry.doctor.finding import PROBLEM, CheckContext, Finding
from telemetry.util.text import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

WIDTH: Final = 100
HEIGHT: Final = 24
"""Size of a terminal. The output always fits."""

_NAME_WIDTH: Final = 11

CHECKS: Final[tuple[Callable[[CheckContext], Iterable[Finding]], ...]] = (
    package_checks.check_enabled,
    package_checks.check_settings,
    package_checks.check_versions,
    package_checks.check_packages,
    gpu_checks.check_gpu,
    gpu_checks.check_cuda_events,
    folder_checks.check_endpoint,
    folder_checks.check_run_folder,
    folder_checks.check_board,
    kernel_checks.check_workers,
    kernel_checks.check_schedstat,
    kernel_checks.check_pressure,
    kernel_checks.check_cgroup,
    kernel_checks.check_memory,
)
"""In the order of the output. `check_cuda_events` uses a result of `check_gpu`."""


def doctor(run_dir: str | None) -> int:
    """Print the findings. Returns 1 if there is a problem, else 0."""
    findings = examine(run_dir)
    show(render(findings) + "\n")
    return int(any(finding.status == PROBLEM for finding in findings))


def examine(run_dir: str | None) -> list[Finding]:
    """Run all checks.

    Args:
        run_dir: the run folder to check; by default that of the settings.
    """
    given = {} if run_dir is None else {"run_dir": run_dir}
    try:
        place = CheckContext(Config.load(given))
    except SettingError as error:
        folder = given if _valid(given) else {}
        place = CheckContext(Config.load(folder, environ={}), error)
    return [finding for check in CHECKS for finding in _contained(check, place)]


def render(findings: Sequence[Finding]) -> str:
    """The findings as lines that fit a terminal: at most two lines each, or one if there are many."""
    problems = sum(finding.status == PROBLEM for finding in findings)
    verdict = (
        "no problem found" if not problems else f"{problems} problem{'s' * (problems != 1)}, see the lines with !!"
    )
    last = f"{verdict}. Lines with -- are optional: the agent works without them."
    for most in (2, 1):
        lines = [line for finding in findings for line in _lines(finding, most)]
        if len(lines) < HEIGHT:
            break
    return "\n".join([*lines[: HEIGHT - 1], last])


def _lines(finding: Finding, most: int) -> list[str]:
    text = " ".join(finding.text.split())  # an error message may have several lines
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


def _contained(check: Callable[[CheckContext], Iterable[Finding]], place: CheckContext) -> list[Finding]:
    """Run a check. If it raises, the error becomes its finding."""
    try:
        return list(check(place))
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return [Finding(PROBLEM, name, f"this check failed itself: {type(error).__name__}: {error}")]
