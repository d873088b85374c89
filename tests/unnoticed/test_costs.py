"""What the agent costs, in calls, entries and bytes. `benchmarks.unnoticed` has the times."""

from __future__ import annotations

import json

from tests.unnoticed.pairs import ITSELF, pair


def told(folder, source: str, **how) -> tuple[dict, dict]:
    """What a script prints as JSON, bare and under the agent."""
    both = pair(folder, source, **how)
    assert [(ended.code, ended.err) for ended in both] == [(0, "")] * 2
    return tuple(json.loads(ended.out) for ended in both)


CALLS = """
    import json, sys
    from unnoticed.training import Training

    def calls(do, times):
        def count(frame, event, argument):
            nonlocal number
            number += event in ("call", "c_call")

        number = 0
        sys.setprofile(count)
        for _ in range(times):
            do()
        sys.setprofile(None)
        return number / times

    def iteration():
        iterator = iter(training.loader)
        next(iterator)

    training = Training()
    training.run(2)
    print(json.dumps({"iteration": calls(iteration, 100), "epoch": calls(training.epoch, 20)}))
"""


def test_a_new_iterator_for_each_step_takes_few_calls(tmp_path):
    bare, ours = told(tmp_path, CALLS)
    assert ours["iteration"] - bare["iteration"] < 300


CYCLES = """
    import gc, json
    import torch._dynamo.trace_rules as rules
    import telemetry

    def state():
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return {"bytes": 4096 * pages, "entries": sum(len(each) for each in vars(rules).values() if isinstance(each, list)),
                "objects": len(gc.get_objects())}

    def cycles(times):
        for _ in range(times):
            telemetry.start(port="off")
            telemetry.stop()

    cycles(40)
    before = state()
    cycles(20)
    print(json.dumps({name: value - before[name] for name, value in state().items()}))
"""


def test_start_and_stop_leave_nothing(tmp_path):
    bare, ours = told(tmp_path, CYCLES, under=ITSELF, preload="unnoticed.compiled_once")
    assert bare["entries"] == ours["entries"] == 0
    assert ours["objects"] < 40
    assert ours["bytes"] < 20 * 50_000
