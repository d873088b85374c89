"""Write the examples in docs/causes.md, the advice for recorded evidence: ``make docs-reference``."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from telemetry.diagnosis.advice import advise
from telemetry.records import speedup_text

if TYPE_CHECKING:
    from telemetry.records import Advice

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "causes.md"

_EVIDENCE: Final = ROOT / "tests" / "zoo" / "evidence"
_RECORDED: Final = {
    "loader_on_training_thread": "main-store",
    "workers_cpu_bound": "cpu-text",
    "workers_io_bound": "io-store",
    "workers_throttled": "throttled-audio",
    "worker_startup": "startup-fork",
    "uneven_batches": "uneven-cold-store",
    "batch_transfer": "transfer-numpy",
    "worker_stuck": "stuck-store",
    "source_slow": "watched-stream",
    "straggler": "straggler-loader",
    "checkpoint": "checkpoint-phase",
    "gc_pause": "gc-callback",
}
"""The file of evidence for each cause with an example."""

_WIDTH: Final = 116


def page() -> str:
    """The page with its examples as the code writes them now."""
    text = PAGE.read_text(encoding="utf-8")
    for cause, recorded in _RECORDED.items():
        block = f"```text\n{_example(cause, recorded)}\n```"
        section = rf"(?s)(\n## {cause}\n(?:(?!\n## ).)*?)```text\n.*?\n```"
        text, replaced = re.subn(section, lambda match, block=block: match[1] + block, text)
        if replaced != 1:
            raise ValueError(f"the section {cause} has no example to replace")
    return text


def _example(cause: str, recorded: str) -> str:
    from tests.zoo.test_replay import evidence_of

    found = json.loads((_EVIDENCE / f"{recorded}.json").read_text(encoding="utf-8"))
    advice = advise(cause, evidence_of(found["evidence"]))[0]
    return "\n".join([*_wrapped(_change(advice), ""), *_wrapped(advice.because, "  ")])


def _change(advice: Advice) -> str:
    setting = f": {advice.setting}={advice.value}" if advice.setting and advice.value else ""
    gain = speedup_text(asdict(advice))
    return f"{advice.action}{setting}" + (f", predicted {gain} times the steps per second" if gain else "")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(), encoding="utf-8")
