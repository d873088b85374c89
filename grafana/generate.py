"""Writes the dashboards: ``python -m grafana.generate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from grafana.fleet import fleet
from grafana.node import node
from grafana.run import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from grafana_foundation_sdk.models.dashboard import Dashboard

FOLDER: Final = Path(__file__).resolve().parent / "dashboards"

DASHBOARDS: Final[dict[str, Callable[[], Dashboard]]] = {"fleet": fleet, "run": run, "node": node}


def text(name: str) -> str:
    """The content of a dashboard's file."""
    return json.dumps(DASHBOARDS[name](), cls=JSONEncoder, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")
