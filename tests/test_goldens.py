"""The commands still say of recorded runs what is written in ``tests/goldens/expected``, to the byte.

``python -m tests.goldens`` writes it anew, after a change that is meant.
"""

from __future__ import annotations

import difflib
import json
import os
import sys

import pytest

from tests import goldens

pytest.importorskip("bokeh")

MAX_LINES = 20


def check(found: dict[str, str], *, of: tuple[str, ...]) -> None:
    """Fail with the first lines that differ, of each file. ``of``: how the names of these files begin."""
    wanted = {path.name: path.read_text("utf-8") for path in goldens.EXPECTED.iterdir() if path.name.startswith(of)}
    assert found.keys() == wanted.keys()
    differ = []
    for name, text in found.items():
        if text != wanted[name]:
            lines = difflib.unified_diff(
                wanted[name].splitlines(), text.splitlines(), f"expected/{name}", "now", n=1, lineterm=""
            )
            differ += [line[:300] for line in [*lines][:MAX_LINES]]
    assert not differ, "\n" + "\n".join(differ)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, without settings from outside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name in [name for name in os.environ if name.startswith("TELEMETRY_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize("name", goldens.names())
def test_a_run(here, name):
    goldens.unpack(here, name)
    check(goldens.of_run(name), of=(f"{name}.",))


def test_comparisons(here):
    goldens.unpack(here, *{name for pair in goldens.PAIRS for name in pair})
    check(goldens.of_comparisons(), of=("compare-",))


def test_traces(here):
    check(goldens.of_traces(), of=("trace-",))


def test_evidence_of_the_zoo():
    check(goldens.of_zoo(), of=("zoo.",))


def test_metrics():
    check(goldens.of_metrics(), of=("metrics.",))


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse breaks lines in other places from 3.13 on")
def test_help(here):
    check(goldens.of_help(), of=("help",))


def test_the_doctor(here):
    check(goldens.of_doctor(), of=("doctor.",))


def test_what_a_run_logs(here):
    """A run of today writes the events, keys and types of the recorded ones."""
    recorded = json.loads(goldens.EVENTS.read_text("utf-8"))
    goldens.train(here / "run", "main,save,evaluate,snapshot", 240)
    found = goldens.events_of([here / "run"])
    assert found.keys() >= {"run_start", "window", "host", "phase", "snapshot", "run_end"}
    for event, keys in found.items():
        # A busy machine may come too late for the steps of the snapshot, and says why.
        # A figure of the machine is null where the kernel counted nothing, such as periods of a quota.
        also = {"snapshot": {"absent", "null", "string"}, "host": {"absent", "null"}}.get(event, {"absent"})
        keys.pop("compute_total_seconds", None)  # newer than the recorded runs
        for key, kinds in keys.items():
            assert set(kinds) <= set(recorded[event].get(key, ())) | also, f"{event}.{key}"
        always = {key for key, kinds in recorded[event].items() if "absent" not in kinds}
        assert always <= keys.keys(), event


def test_each_verdict_is_one_sentence_that_is_read_in_one_breath():
    sentences = [path.read_text("utf-8").splitlines()[2] for path in goldens.EXPECTED.glob("*.report.txt")]
    assert len(sentences) > 30
    assert [each for each in sentences if len(each.split()) > 30] == []
