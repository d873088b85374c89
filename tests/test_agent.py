"""The agent as a whole: what it publishes and logs of a run, and that it ends."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.request

import pytest
from torch.utils.data import DataLoader

import telemetry
from telemetry.config import SettingError
from telemetry.hooks.worker_block import FETCH_BUCKETS
from telemetry.report.logs import load
from telemetry.util import threads
from tests.data_sets import Numbers
from tests.report_logs import summarize
from tests.running_agent import log_lines, scrape, wait_for


def test_a_run_from_start_to_end(agent):
    for _ in DataLoader(Numbers(20, seconds=0.02), batch_size=1, num_workers=1):
        time.sleep(0.01)
    metrics = wait_for(lambda: (m := scrape(agent)).get(("training_steps_total",)) == 20 and m)
    ledger = {k[1]: v for k, v in metrics.items() if k[0] == "training_time_seconds_total"}
    assert set(ledger) == {"startup", "data_wait", "compute", "evaluation", "checkpoint", "other"}
    assert ledger["compute"] >= 0.2
    assert metrics["training_exposed_wait_seconds_total",] == pytest.approx(ledger["data_wait"])
    assert metrics["training_step_duration_seconds_count",] == metrics["training_wait_duration_seconds_count",] == 20
    assert metrics["training_wait_duration_seconds_sum",] < metrics["training_step_duration_seconds_sum",]
    assert metrics["training_wait_duration_seconds_bucket", "0.001"] < 20  # the loader takes twice as long as the loop
    assert metrics["telemetry_overhead_seconds_total", "training"] > 0
    assert metrics["telemetry_collector_up", "host"] == 1
    assert metrics["telemetry_collector_up", "nvml"] == 0
    assert not any("gpu" in name or "cuda" in name for name, *_ in metrics)  # not measured: absent, never 0
    assert metrics["training_run_ended",] == 0
    wait_for(lambda: any(line["event"] == "workers" for line in log_lines(agent)))

    telemetry.stop()
    lines = log_lines(agent)
    assert (lines[0]["event"], lines[-1]["event"]) == ("run_start", "run_end")
    assert {line["event"] for line in lines} <= {"run_start", "window", "host", "workers", "error", "run_end"}
    for line in lines:
        if "ledger_total_seconds" in line:
            assert sum(line["ledger_total_seconds"].values()) == pytest.approx(line["wall_seconds"], abs=1e-4)
    windows = [line for line in lines if line["event"] == "window"]
    assert sum(line["steps"] for line in windows) == 20
    (rank,) = summarize(load(agent.run_dir))["ranks"]
    assert rank["steps"] == 20
    assert 0.01 <= rank["step_seconds"]["p50"]


@pytest.mark.parametrize("workers", [0, 1])
def test_each_fetch_is_counted_with_and_without_workers(agent, workers):
    for _ in DataLoader(Numbers(12, seconds=0.02), batch_size=2, num_workers=workers):
        time.sleep(0.001)
    name = "training_loader_fetch_duration_seconds"
    metrics = wait_for(lambda: (m := scrape(agent)).get((f"{name}_count",)) == 6 and m)
    assert metrics[f"{name}_sum",] >= 6 * 0.04
    assert metrics[f"{name}_bucket", repr(FETCH_BUCKETS[5])] == 0


def test_the_log_tells_of_the_workers_together_and_has_no_field_for_each(agent):
    for _ in DataLoader(Numbers(40, seconds=0.02), batch_size=1, num_workers=2):
        pass
    telemetry.stop()
    counted = [line for line in log_lines(agent) if line["event"] == "workers" and line["fetches_total"]]
    assert counted
    assert not any(isinstance(value, dict) for line in counted for value in line.values())


def test_the_ledger_is_whole_at_every_moment_also_in_a_wait_that_lasts(agent):
    release = threading.Event()

    class Stuck(Numbers):
        def __getitem__(self, index):
            if index == 2:
                release.wait(30)
            return index

    def look():
        waited = wait_for(lambda: (v := data_wait()) > 0.3 and v)
        assert data_wait() >= waited
        release.set()

    def data_wait() -> float:
        return scrape(agent)["training_time_seconds_total", "data_wait"]

    watcher = threading.Thread(target=look)
    watcher.start()
    list(DataLoader(Stuck(4), batch_size=1))
    watcher.join()
    assert release.is_set()


def test_start_twice_is_one_agent(agent, tmp_path):
    assert telemetry.start(tmp_path / "other") is agent


def test_a_bad_setting_starts_nothing(tmp_path):
    before = threads.running(), threading.active_count()
    with pytest.raises(SettingError, match="interval_seconds"):
        telemetry.start(tmp_path / "run", interval_seconds=-1)
    assert (threads.running(), threading.active_count()) == before
    assert not (tmp_path / "run").exists()


def test_stop_and_start_again(tmp_path):
    for number in range(3):
        agent = telemetry.start(tmp_path / str(number), port=0, start_line=False)
        list(DataLoader(Numbers(3), batch_size=1))
        telemetry.stop()
        telemetry.stop()
        assert summarize(load(agent.run_dir))["ranks"][0]["steps"] == 3
        assert threads.running() == []


def test_port_off_serves_nothing(tmp_path):
    agent = telemetry.start(tmp_path / "run", port="off", start_line=False)
    assert agent.metrics_url is None
    assert "telemetry-endpoint" not in threads.running()


def test_the_start_line(tmp_path, capfd):
    agent = telemetry.start(tmp_path / "run", port=0)
    telemetry.stop()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"metrics at http://127.0.0.1:{agent.config.port or ''}"[:25] in err
    assert str(tmp_path / "run") in err


def test_the_start_line_can_be_turned_off(tmp_path, capfd):
    telemetry.start(tmp_path / "run", port=0, start_line=False)
    telemetry.stop()
    assert capfd.readouterr() == ("", "")


def test_patch_off_leaves_torch_alone_and_watch_still_works(tmp_path):
    original = DataLoader.__iter__
    agent = telemetry.start(tmp_path / "run", port="off", patch=False, start_line=False)
    assert DataLoader.__iter__ is original
    loader = DataLoader(Numbers(4), batch_size=1)
    assert len(list(telemetry.watch(loader))) == 4
    agent.accounting.update()
    assert agent.accounting.stats.steps == 4


def test_a_million_steps_a_second_are_counted_if_not_kept(agent):
    """A ring that overflows drops steps and counts them. The ledger stays complete."""
    from telemetry.hooks.ring import CAPACITY, STEP

    with agent.errors.contained("test"):
        ring = agent.tracker.ring
        for _ in range(CAPACITY + 500):
            ring.push(*(agent.accounting.ledger.at_ns,) * 2, STEP)
        assert ring.dropped >= 1
    telemetry.stop()
    (end,) = [line for line in log_lines(agent) if line["event"] == "run_end"]
    assert end["dropped_steps_total"] == ring.dropped
    assert sum(end["ledger_total_seconds"].values()) == pytest.approx(end["wall_seconds"], abs=1e-4)


def test_a_rank_that_has_ended_is_shown_as_ended_while_others_run(tmp_path):
    """Two ranks of one run in two processes. The second ends, and the first still serves."""
    import os
    import subprocess
    import sys

    env = dict(os.environ, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    agent = telemetry.start(tmp_path / "run", port=0, interval_seconds=0.1, start_line=False)
    code = "import sys, telemetry; telemetry.start(sys.argv[1], port=0, start_line=False)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env=env, check=True)

    def text() -> str:
        with urllib.request.urlopen(agent.metrics_url, timeout=10) as answer:
            return answer.read().decode()

    wait_for(lambda: 'training_run_ended{rank="1",run="run"} 1.0' in text())
    wait_for(lambda: 'training_process_threads{rank="1"' not in text())  # a process that is gone has no threads
    assert 'training_run_ended{rank="0",run="run"} 0.0' in text()
    assert 'training_run_ended{rank="1",run="run"} 1.0' in text()


def test_two_jobs_of_one_name_do_not_share_a_target_file(tmp_path):
    from telemetry.node.board import Board

    paths = {Board("r", *of, tmp_path / "boards").path for of in (("/a/r", "n"), ("/b/r", "n"), ("/b/r", "m"))}
    assert len(paths) == 3, "nor do two nodes that are one machine"
    agent = telemetry.start(tmp_path / "run", port=0, start_line=False, targets_dir=tmp_path / "targets")
    (file,) = (tmp_path / "targets").iterdir()
    (target,) = json.loads(file.read_text())
    assert target["targets"] == [agent.metrics_url.removeprefix("http://").removesuffix("/metrics")]
    telemetry.stop()
    assert not list((tmp_path / "targets").iterdir())


def test_a_step_left_with_break_is_a_step(agent):
    for index, _ in enumerate(DataLoader(Numbers(20), batch_size=1)):
        if index == 9:
            break
    telemetry.stop()
    assert summarize(load(agent.run_dir))["ranks"][0]["steps"] == 10


def test_sampling_at_random_times_keeps_the_training_s_random_state(tmp_path, monkeypatch):
    """In a job of several ranks."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    agent = telemetry.start(tmp_path / "run", port="off", start_line=False)
    sampled, sample = [], agent._thread_sampler.sample
    monkeypatch.setattr(agent._thread_sampler, "sample", lambda: sampled.append(sample()))
    before = random.getstate()
    wait_for(lambda: len(sampled) >= 5)
    assert random.getstate() == before
    telemetry.stop()
