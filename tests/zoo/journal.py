"""Results as they come, so that the zoo, which takes hours, goes on where it was stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Final

from .judgement import Advised, Result

_AGENT: Final = Path(__file__).resolve().parents[2] / "telemetry"
_JUDGES: Final = ("attach", "collect", "diagnose", "accounts.py", "judge.py", "sampling.py", "watchdog.py")


def version() -> str:
    """Of the code on which a judgement depends: what another version has said does not count."""
    digest = hashlib.sha256()
    for part in _JUDGES:
        path = _AGENT / part
        for file in sorted(path.glob("*.py")) if path.is_dir() else (path,):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class Journal:
    """A file of JSON lines.

    Args:
        path: of the file; None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._version = version()
        self._known: dict[tuple[str, int], Result] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry["version"] == self._version:
                    self._known[entry["result"]["specimen"], entry["repetition"]] = _result(entry["result"])

    def known(self, specimen: str, repetition: int) -> Result | None:
        """The result of this repetition, if it is there."""
        return self._known.get((specimen, repetition))

    def keep(self, result: Result, repetition: int) -> None:
        """Add a result."""
        if self._path is not None:
            entry = {"version": self._version, "repetition": repetition, "result": dataclasses.asdict(result)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _result(fields: dict[str, Any]) -> Result:
    advised = fields["advised"]
    if advised is not None:
        advised = Advised(**advised | {"arguments": tuple(advised["arguments"])})
    return Result(**fields | {"advised": advised, "others": tuple(fields["others"]), "load": tuple(fields["load"])})
