"""Stores each result immediately, so that the zoo, which takes hours, can continue after it was stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import traceml

from . import processes
from .judgement import Advised, Result

if TYPE_CHECKING:
    from .specimens import Specimen

_AGENT: Final = Path(__file__).resolve().parents[2] / "telemetry"
_JUDGES: Final = ("agent", "diagnosis", "hooks", "report", "sources", "util")
_SHARED: Final = ("common.py", "samples.py", "store_server.py")


class Journal:
    """A file of JSON lines. Results of another version of the script or of the agent's code are ignored.

    Args:
        path: path of the file; None to keep nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._judges = _judges()
        self._entries: dict[tuple[str, str, int], Any] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._entries[entry["specimen"], entry["version"], entry["repetition"]] = entry["said"]

    def known(self, specimen: Specimen, repetition: int) -> Result | None:
        """The stored result of this repetition; else None."""
        said = self._entries.get((specimen.name, _version(specimen, self._judges), repetition))
        return None if said is None else _result(said)

    def keep(self, specimen: Specimen, repetition: int, result: Result) -> None:
        """Add a result."""
        self._add(specimen, self._judges, repetition, dataclasses.asdict(result))

    def known_verdict(self, specimen: Specimen) -> str | None:
        """TraceML's stored diagnosis; else None."""
        verdict: str | None = self._entries.get((specimen.name, _version(specimen, traceml.VERSION), 0))
        return verdict

    def keep_verdict(self, specimen: Specimen, verdict: str) -> None:
        """Add TraceML's diagnosis."""
        self._add(specimen, traceml.VERSION, 0, verdict)

    def _add(self, specimen: Specimen, judges: str, repetition: int, said: Any) -> None:
        if self._path is None:
            return
        version = _version(specimen, judges)
        entry = {"specimen": specimen.name, "version": version, "repetition": repetition, "said": said}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _judges() -> str:
    """The version of the code on which the agent's judgement depends."""
    digest = hashlib.sha256()
    for part in _JUDGES:
        for file in sorted((_AGENT / part).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(specimen: Specimen, judges: str) -> str:
    """The version of the specimen and of the agent's code."""
    script = b"".join((processes.SCRIPTS / name).read_bytes() for name in (f"{specimen.script}.py", *_SHARED))
    how: tuple[Any, ...] = (specimen.arguments, specimen.seconds, specimen.ranks, specimen.cores, specimen.causes)
    if specimen.nodes > 1:
        how += (specimen.nodes, specimen.hang, specimen.reason)
    return hashlib.sha256(script + repr((*how, judges)).encode()).hexdigest()[:12]


def _result(fields: dict[str, Any]) -> Result:
    advised = fields["advised"]
    if advised is not None:
        advised = Advised(**advised | {"arguments": tuple(advised["arguments"])})
    return Result(**fields | {"advised": advised, "others": tuple(fields["others"]), "load": tuple(fields["load"])})
