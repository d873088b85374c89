"""The samples of an interval as one line of the log."""

from __future__ import annotations

import dataclasses

from telemetry import records
from telemetry.core.log_kind import LOG_KIND
from telemetry.publish.log_fields import mean_of
from telemetry.records import GpuSample, ProcessSample
from telemetry.sources import workers
from tests.slice_cases import IDLE


def test_numbers_are_averaged_and_names_are_not():
    """Between worker 0 and worker 4 there is no worker 2."""
    readings = [
        dataclasses.replace(
            IDLE, busy_ratio=busy, head_of_line_worker=worker, head_of_line_since_seconds=since, fetches_total=fetches
        )
        for busy, worker, since, fetches in ((0.2, 0, 9.0, 10), (0.4, 4, 1.0, 20), (0.6, None, None, 30))
    ]
    line = mean_of(readings)
    assert (line["busy_ratio"], line["fetches_total"]) == (0.4, 30)
    assert (line["head_of_line_worker"], line["head_of_line_since_seconds"]) == (4, 1.0)
    assert mean_of([IDLE])["head_of_line_worker"] is None


def test_counters_of_a_sample_are_not_averaged():
    energy = [
        GpuSample(0, "GPU-0", "a GPU", energy_joules=joules, power_watts=watts)
        for joules, watts in ((1e3, 200.0), (2e3, 400.0), (None, None))
    ]
    line = mean_of(energy)
    assert (line["energy_joules"], line["power_watts"]) == (2e3, 300.0)  # the newest that is known, and a mean
    ended = [ProcessSample(seconds, 2, 1, children_cpu_seconds=10 * seconds) for seconds in (0.0, 1.0)]
    line = mean_of(ended)
    assert (line["cpu_seconds"], line["children_cpu_seconds"]) == (1.0, 10.0)


SAMPLES = [
    kind for module in (records, records, workers) for name, kind in vars(module).items() if name.endswith("Sample")
]


def test_every_field_that_may_be_a_counter_says_what_the_log_writes():
    """``_seconds`` may be a duration or a counter: the name does not tell, so the field must."""
    assert len(SAMPLES) > 6
    silent = [
        f"{kind.__name__}.{spec.name}"
        for kind in SAMPLES
        for spec in dataclasses.fields(kind)
        if spec.name.endswith(("_total", "_seconds", "_joules")) and LOG_KIND not in spec.metadata
    ]
    assert silent == []


def test_the_kinds_of_fields_are_the_three_that_exist():
    kinds = {spec.metadata.get(LOG_KIND) for kind in SAMPLES for spec in dataclasses.fields(kind)}
    assert kinds == {None, "mean", "newest", "skip"}
