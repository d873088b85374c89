"""Write docs/settings.md from the fields of `telemetry.Config`: ``make docs-reference``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.config import GROUPS, setting_docs

if TYPE_CHECKING:
    from telemetry.config import SettingDoc

PAGE: Final = Path(__file__).resolve().parents[1] / "settings.md"

_INTRODUCTION: Final = """\
# Settings

<!-- `make docs-reference` writes this page from telemetry/config.py. -->

Each setting can be given in three ways. The first one that is given wins.

| Way | Example |
| --- | --- |
| option of `telemetry run` | `--stall-enter-ratio 0.3` |
| keyword of `telemetry.start` | `telemetry.start(stall_enter_ratio=0.3)` |
| environment variable | `TELEMETRY_STALL_ENTER_RATIO=0.3` |

A value that is not allowed is an error, before anything starts. `TELEMETRY_DISABLED=1` turns everything off.
`telemetry run --help` shows the same list.
"""

_HEAD: Final = "| Setting | Default | Unit | Allowed | Meaning |\n| --- | --- | --- | --- | --- |\n"


def page() -> str:
    """The page, as text."""
    docs = setting_docs()
    parts = [_INTRODUCTION]
    for group, purpose in GROUPS.items():
        rows = "".join(_row(doc) for doc in docs if doc.group == group)
        parts.append(f"\n## {group.capitalize()}\n\n{_sentence(purpose)}\n\n{_HEAD}{rows}")
    return "".join(parts)


def _sentence(text: str) -> str:
    name = text.startswith("torch.")
    return f"`{text.replace(' ', '` ', 1)}." if name else f"{text[0].upper()}{text[1:]}."


def _row(doc: SettingDoc) -> str:
    allowed = doc.allowed if doc.type in doc.allowed else ", ".join(filter(None, (doc.type, doc.allowed)))
    cells = (f"`{doc.name}`", doc.default, doc.unit or "", allowed, doc.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
