"""The last part of ``make dist``: is the right thing in the wheel and in the sdist, and does the wheel install?

python -m tests.distribution dist
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "telemetry"
NOT_SHIPPED = {"__pycache__"}
WANTED_FIELDS = (
    "Summary", "Author", "Requires-Python", "License-Expression", "License-File", "Keywords", "Classifier",
)  # fmt: skip
EXTRAS = {"amd", "demo", "html", "top", "dev"}


def main() -> int:
    """Check the files of a folder. Returns 1 with a line for each thing that is wrong, else 0."""
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    problems = [*check_wheel(wheel), *check_sdist(sdist), *check_installed(wheel)]
    for problem in problems:
        print(f"make dist: {problem}")
    if not problems:
        print(f"{wheel.name} and {sdist.name} are complete, and the wheel installs")
    return int(bool(problems))


def package_files() -> set[str]:
    """What the wheel must have: the files of the package, as in the checkout."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and not NOT_SHIPPED & set(path.parts))
    return {str(path.relative_to(ROOT)) for path in files}


def check_wheel(wheel: Path) -> list[str]:
    """The package and its metadata, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = HeaderParser().parsestr(archive.read(metadata).decode())
    beside = metadata.partition("/")[0] + "/"
    shipped = {name for name in names if not name.startswith(beside)}
    problems = [f"not in the wheel: {name}" for name in sorted(package_files() - shipped)]
    problems += [f"does not belong into the wheel: {name}" for name in sorted(shipped - package_files())]
    return [*problems, *check_metadata(fields)]


def check_metadata(fields: Message) -> list[str]:
    """Complete, and of the version that the package says."""
    problems = [f"the metadata has no {name}" for name in WANTED_FIELDS if not fields.get_all(name)]
    extras = set(fields.get_all("Provides-Extra") or ())
    problems += [f"the extras are {sorted(extras)}, not {sorted(EXTRAS)}"] if extras != EXTRAS else []
    described = str(fields.get_payload())
    problems += [] if described.startswith("# telemetry") else ["the description is not README.md"]
    return problems


def check_sdist(sdist: Path) -> list[str]:
    """All files that `make test` needs, and nothing that git ignores."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {*package_files(), "Makefile", "constraints.txt", "pyproject.toml", "tests/distribution.py", "LICENSE"}
    problems = [f"not in the sdist: {name}" for name in sorted(needed - names)]
    caches = (name for name in sorted(names) if "__pycache__" in name or name.startswith((".venv", "dist/")))
    return [*problems, *(f"does not belong into the sdist: {name}" for name in caches)]


def check_installed(wheel: Path) -> list[str]:
    """In an empty environment: the command is there and says its version, and the doctor finds what it needs.

    Its dependencies are those of the Python that runs this, so that torch is not installed a second time.
    """
    version, dependencies = wheel.name.split("-")[1], sysconfig.get_path("purelib")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder)
        inside = Path(folder) / "bin"
        pip = [sys.executable, "-m", "pip", "--python", inside / "python", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", "--no-deps", wheel], check=True)

        def said(*arguments: str) -> str:
            done = subprocess.run([inside / "telemetry", *arguments], capture_output=True, text=True, cwd=folder)
            return done.stdout + done.stderr

        named = said("--version")
        (site,) = Path(folder).glob("lib/python*/site-packages")
        (site / "dependencies.pth").write_text(f"{dependencies}\n")  # after the wheel's own folder; .pth files not read
        found = said("doctor")
    problems = [] if named == f"telemetry {version}\n" else [f"telemetry --version says {named!r}"]
    fine = f", telemetry {version}\n" in found and all(f"ok {check}" in found for check in ("versions", "packages"))
    return [*problems, *([] if fine else [f"telemetry doctor says:\n{found}"])]


if __name__ == "__main__":
    sys.exit(main())
