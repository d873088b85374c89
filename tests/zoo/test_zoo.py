"""Specimens under the real agent, and what each must have.

The specimens that are run are chosen so that their causes are the same on a busy machine. Only causes are asserted, never
speeds. A loader without workers always fetches on the training thread, and its waits (10 ms a sample against 20 ms of
compute a batch) are for a server that uses almost no CPU. Checkpoints and steps run on the same core, so load makes both
slower. The healthy specimen has its batches in memory, so it only waits for a copy.
"""

import dataclasses

import pytest

from telemetry.diagnosis.causes import CAUSES
from tests.campaign import runner
from tests.campaign.runner import How

from . import traceml
from .specimens import ALL, CONTROLS, SCRIPTS, STALLS

QUICK = {"TELEMETRY_STALL_WINDOW_SECONDS": "4"}


def quick(name):
    (specimen,) = (s for s in ALL if s.name == name)
    return dataclasses.replace(specimen, seconds=6.0)


@pytest.mark.parametrize("name", ["main-store", "checkpoint-phase"])
def test_a_stall_is_found_and_its_cause_is_named(name):
    specimen = quick(name)
    result = runner.run(specimen, How(QUICK, follow=False))
    assert (result.error, result.detected) == (None, True), result.verdict
    assert result.named in specimen.causes, result.stalls


def test_a_healthy_run_is_not_accused():
    result = runner.run(quick("healthy-fast-loader"), How(QUICK))
    assert (result.error, result.accused) == (None, False), (result.verdict, result.stalls)


# -- the specimens -----------------------------------------------------------------------------------------------------


def test_the_specimens_are_complete():
    """Each cause that a CPU can show is there in two styles, and there are as many controls as causes."""
    styles = {cause: [s for s in STALLS if cause in s.causes] for cause in CAUSES}
    few = {cause for cause, specimens in styles.items() if len(specimens) < 2}
    assert few <= {"host_bound", "gpu_throttled", "unknown"}
    assert len(CONTROLS) >= len({cause for s in STALLS for cause in s.causes})
    assert len({s.name for s in ALL}) == len(ALL)
    assert {s.script for s in ALL if not s.script.is_file()} == set()
    assert {cause for s in ALL for cause in s.causes} <= set(CAUSES)


@pytest.mark.parametrize("script", sorted({s.script.name for s in ALL}))
def test_traceml_is_put_into_every_script(script):
    source, shared = (traceml.rewritten((SCRIPTS / name).read_text()) for name in (script, "common.py"))
    step = "with traceml_ai.trace_step("
    assert (source.count(step), "common.train" in source) in {(1, False), (0, True)}
    assert shared.count(step) == 1
    assert source.count("traceml_ai.init(mode='auto')") == 1
    compile(source, script, "exec")
