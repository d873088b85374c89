"""Debian's testing suite in a folder of its own: it has programs that are newer than those of this machine.

`make test-matrix` takes a Python from it that this machine lacks, `make test-stack-testing` its servers. Nothing else of
this machine changes, and nothing stays mounted: each program has its own mount namespace, which ends with it. A pid and
a port inside are those of the machine.

    python -m tests.matrix.debian    makes the folder, and prints a folder for the PATH with the servers
"""

from __future__ import annotations

import os
import shlex
import shutil
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTING = ROOT / ".venv-matrix" / "debian-testing"
SERVERS = ("prometheus", "prometheus-alertmanager", "victoria-metrics")
PROGRAMS = (*SERVERS, "promtool", "amtool")

ENTER = """
root=$1 temporary=$2 tree=$3; shift 3
for folder in /proc /sys /dev "$temporary" "$tree"; do
  mkdir -p "$root$folder" && mount --rbind "$folder" "$root$folder" || exit 1
done
exec chroot "$root" env --chdir="$PWD" "$@"
"""


def lacking() -> str | None:
    """What this machine lacks to make the folder; None if it lacks nothing."""
    if os.geteuid() != 0:
        return "root"
    absent = [command for command in ("debootstrap", "apt-get", "unshare", "chroot") if shutil.which(command) is None]
    return f"{', '.join(absent)} (on Debian: apt-get install debootstrap)" if absent else None


def inside(*command: str | Path) -> list[str]:
    """A command as it runs inside. It sees this tree and the folder for temporary files where they are here."""
    enter = ["unshare", "--mount", "sh", "-c", ENTER, "sh"]
    return [*enter, *map(str, (TESTING, tempfile.gettempdir(), ROOT, *command))]


def install(*packages: str) -> None:
    """Install packages inside, and make the folder if it is not there.

    The packages come from where this machine has its own from, with apt's settings for that.
    """
    if lacking():
        raise SystemExit(f"Debian's testing suite needs {lacking()}")
    if not (TESTING / ".ready").exists():
        shutil.rmtree(TESTING, ignore_errors=True)
        TESTING.parent.mkdir(exist_ok=True)
        run("debootstrap", "--variant=minbase", "testing", TESTING, mirror())
        settings = subprocess.run(["apt-config", "dump"], check=True, capture_output=True, text=True).stdout
        ours = [line for line in settings.splitlines() if line.startswith("Acquire")]
        (TESTING / "etc/apt/apt.conf.d/this-machine").write_text("\n".join(ours) + "\n")
        start_nothing = TESTING / "usr/sbin/policy-rc.d"  # Debian's servers start when they are installed
        start_nothing.write_text("#!/bin/sh\nexit 101\n")
        start_nothing.chmod(0o755)
        shutil.copy("/etc/hosts", TESTING / "etc/hosts")
        run(*inside("apt-get", "update", "-qq"))
        (TESTING / ".ready").touch()
    noninteractive = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-qq")
    run(*inside(*noninteractive, "--no-install-recommends", "ca-certificates", *packages))
    trusted = ssl.get_default_verify_paths().cafile  # where a company's proxy has its own
    if trusted:
        shutil.copy(trusted, TESTING / "etc/ssl/certs/ca-certificates.crt")


def mirror() -> str:
    """Where apt of this machine finds Debian."""
    fields = ["--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian", "Label: Debian"]
    found = subprocess.run(["apt-get", "indextargets", *fields], check=True, capture_output=True, text=True).stdout
    if not found.strip():
        raise SystemExit("apt knows no mirror of Debian here: run apt-get update")
    return found.splitlines()[0]


def run(*command: str | Path) -> None:
    """Run a command; its output goes to stderr."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def programs() -> Path:
    """A folder for the PATH: scripts with the servers' names that run those of the testing suite."""
    install(*SERVERS)
    folder = TESTING.with_name("debian-testing-bin")
    folder.mkdir(exist_ok=True)
    for name in PROGRAMS:
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(inside(f"/usr/bin/{name}"))} "$@"\n')
        script.chmod(0o755)
    return folder


if __name__ == "__main__":
    print(programs())
