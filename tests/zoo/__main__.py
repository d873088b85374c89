"""``python -m tests.zoo``: runs the zoo, prints the table, writes the results. Exits with 0 if all goals are reached."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from benchmarks import traceml as benchmarked
from tests.campaign import runner
from tests.campaign.command import Campaign

from . import traceml
from .specimens import ALL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.campaign import Journal
    from tests.campaign.specimen import Specimen


def ask_traceml(specimens: Sequence[Specimen], journal: Journal) -> dict[str, str]:
    """TraceML's verdict on each specimen of one node."""
    verdicts: dict[str, str] = {}
    try:
        interpreter = traceml.python()
    except traceml.ToolError as error:
        print(f"without TraceML's verdicts: {error}")
        return verdicts
    for specimen in specimens:
        if specimen.nodes > 1:
            continue
        key = f"TraceML {specimen.name} {runner.version_of(specimen, benchmarked.VERSION)}"
        verdict = journal.known(key)
        if verdict is None:
            verdict = traceml.verdict(interpreter, specimen)
            journal.keep(key, verdict)
        verdicts[specimen.name] = verdict
        print(f"TraceML  {specimen.name:22} {verdict}", flush=True)
    return verdicts


ZOO: Final = Campaign(
    name="zoo",
    title="What the agent says of the zoo",
    specimens=ALL,
    headings=("specimen", "is", "found", "named first", "right", "predicted", "realised", "TraceML 0.5.0"),
    max_off=0.15,
    repeat=3,
    rivals=ask_traceml,
)

if __name__ == "__main__":
    sys.exit(ZOO.main())
