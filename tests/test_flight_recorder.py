"""The newest collective of a process, from torch's flight recorder."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from telemetry.diagnosis.hangs import Collective
from telemetry.sources.flight_recorder import FlightRecorder


def entry(number: int, name: str = "gloo:all_reduce", *, retired: bool = False, **fields) -> dict:
    told = dict(
        collective_seq_id=number, p2p_seq_id=0, is_p2p=False, profiling_name=name, process_group=["0", "default_pg"]
    )
    return told | dict(input_sizes=[[4, 8]], input_dtypes=["Float"], retired=retired) | fields


def status(enqueued: int, completed: int) -> dict:
    return {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(completed)}


class Torch:
    """Stands in for torch.distributed, whose recorder has these contents."""

    def __init__(self, monkeypatch, pg_status=None, entries=(), *, backend="gloo", has_recorder=True, count=7) -> None:
        self.asked: list[tuple[bool, bool]] = []
        self.content = {"pg_status": pg_status or {}, "entries": list(entries)}
        world = SimpleNamespace(_get_sequence_number_for_group=lambda: count)
        dist = SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: True, get_backend=lambda: backend,
            group=SimpleNamespace(WORLD=world),
        )  # fmt: skip
        name = "_dump_nccl_trace_json" if "nccl" in backend else "_dump_fr_trace_json"
        c10d = SimpleNamespace(**{name: self.dump} if has_recorder else {})
        monkeypatch.setitem(sys.modules, "torch.distributed", dist)
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", c10d)

    def dump(self, collectives: bool, only_active: bool) -> bytes:
        self.asked.append((collectives, only_active))
        shown = self.content if collectives else {"pg_status": self.content["pg_status"]}
        return json.dumps(shown, separators=(",", ":")).encode()


def test_the_collective_that_has_not_ended_is_the_oldest_of_those(monkeypatch):
    Torch(monkeypatch, {"0": status(9, 7)}, [entry(7, retired=True), entry(8, "gloo:broadcast"), entry(9)])
    read = FlightRecorder().read()
    assert read.newest == Collective("broadcast", 8, "0", "4x8 Float")
    assert (read.pending, read.recorder) == (True, "on")


def test_the_list_is_read_once_for_each_newest_collective(monkeypatch):
    torch = Torch(monkeypatch, {"0": status(9, 9)}, [entry(9, retired=True)])
    recorder = FlightRecorder()
    assert recorder.read().newest == Collective("", 9, "0")
    assert recorder.read().pending is False
    assert torch.asked == [(False, False)] * 2
    torch.content = {"pg_status": {"0": status(10, 9)}, "entries": [entry(10)]}
    for _ in range(3):
        assert recorder.read().newest.name == "all_reduce"
    assert torch.asked.count((True, False)) == 1


def test_of_nccl_only_the_state_of_the_groups_is_read(monkeypatch):
    torch = Torch(monkeypatch, {"0": status(12, 9)}, [entry(10)], backend="cpu:gloo,cuda:nccl")
    read = FlightRecorder().read()
    assert read.newest == Collective("", 10, "0"), "the first that has not ended"
    assert read.pending
    assert torch.asked == [(False, False)], "the list would ask CUDA for the state of events"


def test_of_several_groups_the_one_that_waits_counts(monkeypatch):
    Torch(monkeypatch, {"0": status(500, 500), "1": status(3, 2)}, [entry(3, process_group=["dp", "x"])])
    assert FlightRecorder().read().newest == Collective("all_reduce", 3, "dp", "4x8 Float")


def test_point_to_point_has_numbers_of_its_own(monkeypatch):
    sent = entry(4, "gloo:recv 0<-1", is_p2p=True, p2p_seq_id=11, input_sizes=[[], [2]], input_dtypes=["Int", "Int"])
    Torch(monkeypatch, {"0": status(4, 3)}, [sent])
    assert FlightRecorder().read().newest == Collective("recv 0<-1", 11, "0", "scalar Int and 1 more")


@pytest.mark.parametrize(("has_recorder", "said"), [(True, "off"), (False, "absent")])
def test_without_a_recorder_torch_counts_all_the_same(monkeypatch, has_recorder, said):
    Torch(monkeypatch, has_recorder=has_recorder)
    read = FlightRecorder().read()
    assert (read.newest, read.pending, read.recorder) == (Collective("", 7), None, said)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"pg_status":{"0":{"last_enqueued_collective":"x"}}}', b'{"pg_status":1}']
)
def test_whatever_torch_answers_nothing_is_raised(monkeypatch, content):
    torch = Torch(monkeypatch)
    torch.dump = None
    monkeypatch.setitem(
        sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace_json=lambda *_: content)
    )
    assert FlightRecorder().read() is None


def test_without_torch_distributed_there_is_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert FlightRecorder().read() is None
