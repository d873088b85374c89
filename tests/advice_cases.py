"""Windows and a short function for the tests of advice."""

from __future__ import annotations

import dataclasses

from telemetry.diagnosis.advice import advise
from tests.slice_cases import with_workers
from tests.slices import Slice, evidence_over


def first(cause: str, part: Slice):
    return advise(cause, evidence_over([part]))[0]


HELD = with_workers(busy=0.99, cpu=0.24, runnable=0.75, fetches=20, steps=20, wait=0.7, compute=0.3, cores=2.0)


def uneven(slowest_seconds: float, **settings):
    """One second with ten steps: 50 ms of compute each, fetches of 100 ms in four workers, one of which may be slower."""

    def at(fetches):
        fetched = {1: (fetches, 0.06 * fetches), 2: (fetches, slowest_seconds * fetches)}
        part = with_workers(
            busy=0.25, blocked=0.25, fetches=10, wait=0.5, compute=0.5, fetch_wait=0.4, transfer_wait=0.05
        )
        sample = dataclasses.replace(part.workers, fetched=fetched)
        return dataclasses.replace(part, workers=sample, settings={"in_order": True, "prefetch_factor": 2} | settings)

    return evidence_over([at(10), at(20), at(30)])
