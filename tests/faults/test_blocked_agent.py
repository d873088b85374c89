"""The agent's thread hangs, in a callback, a file system or a resolver, while the ring overflows; once for 20 s.

The script measures its own times. Although spans are dropped, no counter decreases, each step is counted once, and the
ledger equals the script's own measurement.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.processes import Child, results, run_script, write

QUIET = dict(run="r", start_line=False, interval_seconds=0.1, log_interval_seconds=0.2, stall_window_seconds=1)

HANGS = """
    import os, socket, threading
    from telemetry.util.threads import named

    armed, hanging, release = threading.Event(), threading.Event(), threading.Event()

    def hang():
        hanging.set()
        release.wait()

    def hanging_on_the_agent_thread(original):
        def call(*args, **more):
            if armed.is_set() and named(threading.get_ident()) == "telemetry-agent":
                hang()
            return original(*args, **more)
        return call

    def resolving(original):
        def call(host, *args, **more):
            if named(threading.get_ident()) != "telemetry-resolver":
                return original(host, *args, **more)
            hang()
            return original("127.0.0.1", *args, **more)
        return call

    def prepare(what):
        if what == "file system":
            os.write = hanging_on_the_agent_thread(os.write)
        elif what == "all files":
            for name in ("open", "stat", "rename", "replace", "write"):
                setattr(os, name, hanging_on_the_agent_thread(getattr(os, name)))
        elif what == "named host":
            socket.getaddrinfo = resolving(socket.getaddrinfo)
            return {"host": "a-name.invalid"}
        elif what == "resolver":
            socket.getaddrinfo = hanging_on_the_agent_thread(socket.getaddrinfo)
            socket.socket.bind = hanging_on_the_agent_thread(socket.socket.bind)
        return {"on_stall": on_stall} if what == "callback" else {}

    def on_stall(stall):
        if armed.is_set():
            hang()

    def begin(what, agent):
        "From now on the agent hangs, or will as soon as it gets there."
        if what == "named host":
            return  # that hangs from the start
        release.clear()
        hanging.clear()
        armed.set()
        if what == "resolver" and agent._node.endpoint is not None:
            os.close(agent._node.endpoint._listening.number)  # so that it looks for a port again

    def end():
        armed.clear()
        release.set()
    """

SCRIPT = """
    import io, json, sys, time, torch, telemetry
    from quick_optimizers import QuickSGD
    from full_views import page
    import telemetry.hooks.ring as ring
    # A small ring, so that steps can be long enough for two clocks to agree on them.
    ring.CAPACITY, ring.WORDS, ring.MASK = 256, 1024, 1023
    from hangs import begin, end, hanging, prepare
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

    def evaluate():
        before = current
        switch("evaluation")
        with torch.no_grad():
            for _ in torch.utils.data.DataLoader(Data(EVALUATED), batch_size=1):
                time.sleep(1e-3)
        switch(before)

    def save():
        before = current
        switch("checkpoint")
        torch.save({"slow": SlowToSave()}, io.BytesIO())
        switch(before)

    def epoch(batches):
        global steps
        loader = torch.utils.data.DataLoader(Data(batches), batch_size=1)
        switch("data_wait")
        iterator = iter(loader)
        for number in range(batches):
            switch("data_wait")
            next(iterator)
            if explicit:
                switch("other")
                with telemetry.step():
                    switch("compute")
                    time.sleep(1e-3)
                    optimizer.step()
                    steps += 1
                switch("other")
            else:
                switch("compute")
                time.sleep(1e-3)
                optimizer.step()
                steps += 1
            if number == 40:
                evaluate()
                save()
        switch("data_wait")
        next(iterator, None)
        switch("other")

    published = []
    agent = telemetry.start("run", port=0, **json.loads(sys.argv[3]), **prepare(what))
    at = agent.accounting.ledger.start_ns  # the imports before it are not the agent's to know
    publish = agent._node.publish

    def publishing(rank, view, **more):
        published.append(view)
        return publish(rank, view, **more)

    agent._node.publish = publishing
    epoch(50)
    for _ in range(2 if what in {"file system", "resolver"} else 1):
        begin(what, agent)
        while not hanging.is_set():
            epoch(20)
        mark = len(published)
        since, rounds = time.monotonic(), 0
        while rounds < 3 or (what == "all files" and time.monotonic() < since + 20):
            epoch(BATCHES)
            evaluate()
            save()
            rounds += 1
        tries = 300 if what in {"callback", "named host"} else 0
        while len(published) < mark + 3 and tries:
            tries -= 1
            epoch(20)
        went_on = len(published) >= mark + 3
        end()
        evaluate()
        epoch(60)
        tries = 300
        while agent.metrics_url is None and tries:
            tries -= 1
            epoch(20)
    served = agent.metrics_url is not None
    dropped = agent.tracker.ring.dropped
    switch("other")
    telemetry.stop()
    with open("results.json", "w") as file:
        seconds = {k: v / 1e9 for k, v in spent.items()}
        errors = agent.errors.counts
        json.dump([steps, dropped, went_on, served, seconds, [*map(page, published)], errors, waited_for_a_core()], file)
    """


def counters(text: str) -> dict:
    """All samples that must never decrease."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in {"counter", "histogram"}
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def value(samples: dict, name: str, **labels: str) -> float:
    (found,) = [v for key, v in samples.items() if key[0] == name and labels.items() <= dict(key[1:]).items()]
    return found


@pytest.mark.parametrize(
    ("what", "steps_are"),
    [
        ("all files", "batches"),
        ("file system", "batches"),
        ("file system", "step"),
        ("resolver", "batches"),
        ("named host", "batches"),
        ("callback", "step"),
    ],
)
def test_an_agent_that_hangs_loses_no_second_and_no_step(tmp_path, what, steps_are):
    write(tmp_path, "hangs.py", HANGS)
    run_script(SCRIPT, tmp_path, what, steps_are, json.dumps(QUIET))
    steps, dropped, went_on, served, spent, published, errors, without_core = results(tmp_path)
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
    assert value(last, "training_steps_total") == steps
    kept = value(last, "training_step_duration_seconds_count")
    assert kept + value(last, "telemetry_dropped_steps_total") == steps
    assert value(last, "telemetry_dropped_steps_total") == dropped

    wall = sum(spent.values())
    ledger = {c: value(last, "training_time_seconds_total", category=c) for c in spent}
    assert sum(ledger.values()) == pytest.approx(wall, rel=0.01)
    # Between the script's stamp and the agent's, the thread may have lost its core. So the two may differ by that time.
    assert ledger == pytest.approx(spent, abs=0.01 * wall + without_core)

    (log,) = (tmp_path / "run" / "logs").iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    windows = [line for line in lines if line["event"] == "window"]
    for before, after in pairwise(windows):
        totals = before["ledger_total_seconds"], after["ledger_total_seconds"]
        assert all(totals[1][category] >= totals[0][category] for category in spent)
        assert all(seconds >= 0 for seconds in after["ledger_seconds"].values())
    assert lines[-1]["event"] == "run_end"
    assert lines[-1]["steps_total"] == steps


@pytest.mark.parametrize("what", ["all files", "file system", "resolver", "named host", "callback"])
def test_a_run_ends_while_its_agent_hangs(tmp_path, what):
    """``stop`` returns in bounded time, and the process does not wait for the agent's threads."""
    write(tmp_path, "hangs.py", HANGS)
    script = write(
        tmp_path,
        "script.py",
        """
        import json, sys, time, telemetry
        from hangs import begin, hanging, prepare
        agent = telemetry.start("run", port=0, **json.loads(sys.argv[2]), **prepare(sys.argv[1]))
        begin(sys.argv[1], agent)
        def batches():
            while not hanging.is_set():
                time.sleep(0.002)
                yield 1
        for _ in telemetry.watch(batches()):
            pass
        telemetry.stop()
        print("stopped", flush=True)
        sys.exit(7)
        """,
    )
    with Child(script, what, json.dumps(QUIET), cwd=tmp_path) as child:
        assert child.line() == "stopped"
        assert child.process.wait(60) == 7
        assert child.stderr == ""
