"""The shipped rules on real runs: who is paged, for what, and when it is over."""

import subprocess

import pytest

from stack.cluster import recorded
from stack.cluster.conftest import HEALTHY, STARVED, STARVED_RANK

pytestmark = pytest.mark.stack

WITHOUT_DATA = {
    "run_rank:training_stuck:seconds": "nobody is stuck",
    "run_node:training_slow_node:excess_ratio": "no node is slow as a whole",
    "run:training_ranks_without_price:count": "all runs have a price",
}
"""Recorded series that these runs do not have, and why."""

OF_THE_STARVED_RUN = {"TrainingStarving", "TrainingStraggler"}


def node_of(job):
    lines = [line for line in job.logs() if line["event"] == "run_start"]
    (node,) = {line["node"] for line in lines}
    return node


def fired(monitoring, run, over="[1h]"):
    """Names of the alerts on a run that have been firing in this time; with an empty ``over``, that fire now."""
    firing = f'ALERTS{{run="{run}",alertstate="firing"}}'
    found = monitoring.prometheus.query(f"last_over_time({firing}{over})" if over else firing)
    return {series["metric"]["alertname"] for series in found}


def test_ranks_are_discovered_by_their_target_files(monitoring, starved, healthy, recorded_run, starving):
    ranks = monitoring.prometheus.query("count by (job, instance, run, node) (training_run_info)")

    found = [(s["metric"]["run"], s["metric"]["instance"], s["metric"]["node"], s["value"][1]) for s in ranks]
    assert sorted(found) == [
        (HEALTHY, f"127.0.0.1:{healthy.port}", node_of(healthy), "2"),
        (STARVED, f"127.0.0.1:{starved.port}", node_of(starved), "4"),
        (recorded.RUN, f"127.0.0.1:{recorded_run.port}", recorded.NODE, "2"),
    ]
    assert {series["metric"]["job"] for series in ranks} == {"training"}


def test_rules_are_evaluated_without_an_error(rules):
    loaded, _ = rules

    assert {rule["health"] for rule in loaded} == {"ok"}, [rule for rule in loaded if rule["health"] != "ok"]
    assert {rule.get("lastError", "") for rule in loaded} == {""}


def test_every_recording_rule_gives_data(rules):
    _, recorded = rules

    without = {name for name, series in recorded.items() if not series}
    assert len(recorded) > 15
    assert without <= WITHOUT_DATA.keys(), without
    assert WITHOUT_DATA.keys() <= recorded.keys()


def test_starvation_pages_with_rank_node_and_cause(starving, starved):
    (alert,) = [alert for alert in starving if alert["labels"]["run"] == STARVED]

    assert alert["labels"] == {
        "alertname": "TrainingStarving", "severity": "critical", "run": STARVED, "rank": str(STARVED_RANK),
        "node": node_of(starved),
    }  # fmt: skip
    said = alert["annotations"]
    assert said["cause"] == "workers_io_bound"
    assert f"{STARVED} rank {STARVED_RANK}: the device idles" in said["summary"]
    for words in (f"rank {STARVED_RANK} on node {node_of(starved)}", "Cause: workers_io_bound.", "Next: "):
        assert words in said["description"]
    assert said["runbook_url"] == "docs/runbook.md#trainingstarving"


def test_the_ranks_that_wait_name_the_straggler_and_its_cause(monitoring, starving):
    alerts = monitoring.webhook.alerts("firing", "TrainingStraggler")

    assert {(a["labels"]["run"], a["labels"]["rank"], a["annotations"]["cause"]) for a in alerts} == {
        (STARVED, str(STARVED_RANK), "workers_io_bound")
    }


def test_a_mended_loader_resolves_it(mended, starving, monitoring):
    assert {(a["labels"]["run"], a["labels"]["rank"]) for a in mended} == {(STARVED, str(STARVED_RANK))}
    assert fired(monitoring, STARVED, over="") <= {"TelemetryEndpointDown"}


def test_a_healthy_run_and_a_normal_end_page_nobody(monitoring, ended):
    """The kill that is told in the meantime says that the end would have been by now."""
    assert fired(monitoring, HEALTHY) == set()
    assert [alert for alert in monitoring.webhook.told if alert["labels"].get("run") != STARVED] == []
    assert [name for name in ended["left"] if name.startswith(HEALTHY)] == []


def test_a_kill_of_all_ranks_pages_once_until_its_target_file_is_removed(monitoring, ended, starved):
    (down,) = ended["down"]

    assert down["labels"]["run"] == STARVED
    assert down["labels"]["node"] == node_of(starved)
    assert "(ranks: 4)" in down["annotations"]["summary"]
    assert "(rank 0 1 2 3)" in down["annotations"]["description"]
    assert [alert["labels"]["run"] for alert in ended["up"]] == [STARVED]
    assert fired(monitoring, STARVED) == {*OF_THE_STARVED_RUN, "TelemetryEndpointDown"}


def test_promtool_checks_the_configuration_in_use(monitoring, promtool):
    configuration = str(monitoring.folder / "prometheus.yml")
    check = subprocess.run([promtool, "check", "config", configuration], capture_output=True, text=True, timeout=30)

    assert check.returncode == 0, check.stdout + check.stderr
