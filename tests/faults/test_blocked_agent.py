"""The agent's thread hangs, in a callback, a file system or a resolver, while the ring overflows; once for 10 s.

The script measures its own times. Although spans are dropped, no counter decreases, each step is counted once, and the
ledger equals the script's own measurement.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.faults.hung_agent import WAYS
from tests.faults.processes import Child, events, log_lines, quiet, run, samples, write

SCRIPT = """
    import io, sys, time, torch, telemetry
    from full_views import page
    import telemetry.seams.ring as ring
    # A small ring, so that steps can be long enough for two clocks to agree on them.
    ring.CAPACITY, ring.WORDS, ring.MASK = 256, 1024, 1023
    from tests.faults.hung_agent import begin, end, hanging, prepare
    from tests.faults.inside import errors, tell
    from tests.quick_optimizers import QuickSGD
    what, explicit = sys.argv[1], sys.argv[2] == "step"
    BATCHES, EVALUATED = 60 if explicit else 170, 20
    spent = dict.fromkeys(("startup", "data_wait", "compute", "evaluation", "checkpoint", "other"), 0)
    now, steps, current = time.monotonic_ns, 0, "startup"

    def waited_for_a_core():
        "Run-queue delay of this thread, in seconds."
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9

    def switch(category):
        global at, current
        stamp = now()
        spent[current] += stamp - at
        at, current = stamp, category

    class Data(torch.utils.data.Dataset):
        def __init__(self, length):
            self.length = length
        def __len__(self):
            return self.length
        def __getitem__(self, index):
            time.sleep(1e-3)
            return index

    class SlowToSave:
        def __reduce__(self):
            time.sleep(0.1)
            return str, ()

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = QuickSGD([parameter], lr=0.1)
    parameter.grad = torch.zeros(1)

    def pause():
        "An evaluation and a checkpoint."
        before = current
        switch("evaluation")
        with torch.no_grad():
            for _ in torch.utils.data.DataLoader(Data(EVALUATED), batch_size=1):
                time.sleep(1e-3)
        switch("checkpoint")
        torch.save({"slow": SlowToSave()}, io.BytesIO())
        switch(before)

    def compute():
        global steps
        switch("compute")
        time.sleep(1e-3)
        optimizer.step()
        steps += 1

    def epoch(batches):
        loader = torch.utils.data.DataLoader(Data(batches), batch_size=1)
        switch("data_wait")
        iterator = iter(loader)
        for number in range(batches):
            switch("data_wait")
            next(iterator)
            if explicit:
                switch("other")
                with telemetry.step():
                    compute()
                switch("other")
            else:
                compute()
            if number == 40:
                pause()
        switch("data_wait")
        next(iterator, None)
        switch("other")

    def epochs_until(condition, tries=300):
        while not condition() and tries:
            tries -= 1
            epoch(20)

    published = []
    agent = telemetry.start("run", run="r", stall_window_seconds=1, **prepare(what))
    at = agent.accounting.ledger.start_ns  # the imports before it are not the agent's to know
    publish = agent._node.publish

    def publishing(rank, view, **more):
        published.append(view)
        return publish(rank, view, **more)

    agent._node.publish = publishing
    epoch(50)
    for _ in range(2 if what in {"file system", "resolver"} else 1):
        begin(what)
        epochs_until(hanging.is_set)
        mark = len(published)
        since, rounds = time.monotonic(), 0
        while rounds < 3 or (what == "all files" and time.monotonic() < since + 10):
            epoch(BATCHES)
            pause()
            rounds += 1
        if what in {"callback", "named host"}:
            epochs_until(lambda: len(published) >= mark + 3)
        went_on = len(published) >= mark + 3
        end()
        pause()
        epoch(60)
        epochs_until(lambda: agent.metrics_url)
    served, dropped, failed = agent.metrics_url is not None, agent.tracker.ring.dropped, errors()
    switch("other")
    telemetry.stop()
    seconds = {k: v / 1e9 for k, v in spent.items()}
    tell([steps, dropped, went_on, served, seconds, [*map(page, published)], failed, waited_for_a_core()])
    """


def counters(text: str) -> dict:
    """All samples that must never decrease."""
    kinds = ("_total", "_count", "_sum", "_bucket")
    return {
        (name, *sorted(labels.items())): value
        for name, found in samples(text).items()
        for labels, value in found
        if name.endswith(kinds)
    }


def only(samples: dict, name: str, **labels: str) -> float:
    (found,) = [v for key, v in samples.items() if key[0] == name and labels.items() <= dict(key[1:]).items()]
    return found


@pytest.mark.parametrize(
    ("what", "steps_are"),
    [
        ("all files", "batches"), ("file system", "step"), ("resolver", "batches"), ("named host", "batches"),
        ("callback", "step"),
    ],
)  # fmt: skip
def test_an_agent_that_hangs_loses_no_second_and_no_step(tmp_path, what, steps_are):
    found = run(tmp_path, SCRIPT, what, steps_are)
    steps, dropped, went_on, served, spent, published, errors, without_core = found
    assert not set(errors) - {"on_stall", "endpoint"}
    assert served, "once it hangs no more"
    if what in {"callback", "named host"}:
        assert went_on, "neither a callback nor a resolver holds the agent up"
    else:
        assert dropped, "the ring was to overflow"

    seen = [counters(text) for text in published]
    for before, after in pairwise(seen):
        assert {key: v for key, v in before.items() if after.get(key, v) < v} == {}
    last = seen[-1]
    assert only(last, "training_steps_total") == steps
    assert only(last, "telemetry_dropped_steps_total") == dropped
    assert only(last, "training_step_duration_seconds_count") + dropped == steps

    wall = sum(spent.values())
    ledger = {c: only(last, "training_time_seconds_total", category=c) for c in spent}
    assert sum(ledger.values()) == pytest.approx(wall, rel=0.01)
    # Between the script's stamp and the agent's, the thread may have lost its core. So the two may differ by that time.
    differ = 0.01 * wall + without_core
    if dropped:  # the time of steps that did not fit into the ring is other
        assert all(ledger[category] <= spent[category] + differ for category in spent if category != "other")
        assert ledger["other"] >= spent["other"] - differ
    else:
        assert ledger == pytest.approx(spent, abs=differ)

    for before, after in pairwise(events(tmp_path / "run", "window")):
        totals = before["ledger_total_seconds"], after["ledger_total_seconds"]
        assert all(totals[1][category] >= totals[0][category] for category in spent)
        assert all(seconds >= 0 for seconds in after["ledger_seconds"].values())
    end = log_lines(tmp_path / "run")[-1]
    assert (end["event"], end["steps_total"]) == ("run_end", steps)


@pytest.mark.parametrize("what", WAYS)
def test_a_run_ends_while_its_agent_hangs(tmp_path, what):
    """``stop`` returns in bounded time, and the process does not wait for the agent's threads."""
    source = """
        import sys, time, telemetry
        from tests.faults.hung_agent import begin, hanging, prepare
        telemetry.start("run", stall_window_seconds=1, **prepare(sys.argv[1]))
        begin(sys.argv[1])
        def batches():
            while not hanging.is_set():
                time.sleep(0.002)
                yield 1
        for _ in telemetry.watch(batches()):
            pass
        telemetry.stop()
        print("stopped", flush=True)
        sys.exit(7)
        """
    with Child(write(tmp_path, "script.py", source), what, cwd=tmp_path, env=quiet()) as child:
        assert child.line() == "stopped"
        child.ends(7)
