"""Every query of every dashboard against the live runs, asked of Prometheus and of VictoriaMetrics behind it."""

import re

import pytest

from benchmarks import grafana

pytestmark = pytest.mark.stack

STORES = ["prometheus", "victoriametrics"]

EMPTY = {
    "run / annotation / Ended": "no run has ended yet",
    "run / annotation / Hangs": "no job hangs",
    "run / annotation / Changes": "no run becomes slower for good",
    "fleet / GPU-hours lost to restarts / A": "no run is restarted, and the start took less than 18 s",
    "run / GPU-hours lost to restarts / A": "the same",
    "fleet / Cost, by run / D": "every run has a price",
    "run / Ranks that are waited for / B": "no job hangs",
    "run / Snapshots / B": "no run has switched its snapshots off",
    "run / Errors and dropped steps / B": "no step is dropped",
    "run / The slowest rank, and slow nodes / B": "no node is slow as a whole",
    "run / Samples and tokens a second / B": "no script tells its tokens",
    "fleet / Tokens a second, by run / A": "the same",
} | {f"node / Errors of the GPUs / {letter}": "no GPU has an error" for letter in "ABCDEFGH"}
"""Queries that these runs have no data for, and why."""

RECORDED_ONLY = {
    r"training_(gpu|cuda)_|dcgm_": "there is no GPU: the run that was recorded on one has them, or the fake driver",
    r'part="copy"': "there is no device to which batches are copied",
    r'part="compile"': "nothing is compiled",
    r"training_cgroup_": "a machine may set no limit",
    r"training_memory_": "these runs are too short to tell whether their memory grows",
    r"collector_up": "no collector fails here",
    r"telemetry_errors_total": "nothing fails here",
}
"""What the live runs need not show, by what is asked for, and why: the recorded run has it all."""


@pytest.fixture(scope="module")
def queries():
    """Every query by its name."""
    loaded = grafana.load()
    found = [query for name, dashboard in loaded.items() for query in grafana.queries_of(name, dashboard)]
    return {query.key: query for query in found}


@pytest.mark.parametrize("store", STORES)
def test_no_query_is_an_error(answers, store):
    errors = {key: answer.errors for key, answer in answers[store].items() if answer.errors}

    assert errors == {}
    assert answers[store]


@pytest.mark.parametrize("store", STORES)
def test_every_query_gives_data(answers, store, queries):
    assert queries.keys() <= answers[store].keys()
    empty = {key for key, answer in answers[store].items() if not any(answer.series.values())}

    assert empty - EMPTY.keys() == set()


@pytest.mark.parametrize("store", STORES)
def test_what_needs_no_gpu_gives_data_of_the_live_runs(answers, store, queries):
    empty = set()
    for key, answer in answers[store].items():
        live = [count for scene, count in answer.series.items() if not {"recorded", "recorded-node"} & set(scene)]
        asked = queries[key].expression if key in queries else ""
        if not any(live) and not any(re.search(pattern, asked) for pattern in RECORDED_ONLY):
            empty.add(key)

    assert empty - EMPTY.keys() == set()
