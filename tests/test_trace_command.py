"""``telemetry trace`` as it is used: real files, real recordings."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from telemetry.cli import main

ROOT = Path(__file__).parents[1]
TRACES = Path(__file__).parent / "traces"
WORKERS0 = TRACES / "v100_resnet50_workers0.json.gz"

KEYS = [
    "file", "rank", "world_size", "device", "steps", "average", "gpu", "temporal", "overlap_ratio", "idle",
    "operators", "kernels", "memcpy", "synchronizations", "advice",
]  # fmt: skip


Done = namedtuple("Done", "returncode stdout stderr")


@pytest.fixture
def run(capsys):
    def ran(*arguments):
        try:
            status = main(["trace", *map(str, arguments)])
        except SystemExit as leaving:
            status = leaving.code
        return Done(status, *capsys.readouterr())

    return ran


@pytest.fixture
def as_json(run):
    def read(*arguments):
        done = run(*arguments, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return read


def process(*arguments, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, "-m", "telemetry", "trace", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, errors="replace")


def test_json_of_a_file_is_the_contract(as_json):
    trace = as_json(WORKERS0)
    assert set(KEYS) <= set(trace)
    assert trace["file"] == str(WORKERS0)
    assert trace["steps"][0].keys() == {"step", "seconds", "categories"}
    assert list(trace["average"]["categories"]) == [
        "Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other",
    ]  # fmt: skip
    assert trace["average"].keys() == {"seconds", "categories"}
    assert trace["gpu"].keys() == {
        "utilization_ratio", "sm_efficiency_ratio", "occupancy_ratio", "tensor_core_ratio",
    }  # fmt: skip
    assert trace["temporal"].keys() == {"idle_ratio", "compute_ratio", "non_compute_ratio"}
    assert trace["idle"][0].keys() == {"stream", "host_wait_ratio", "kernel_wait_ratio", "other_ratio"}
    assert trace["advice"][0].keys() == {"action", "because", "share_ratio"}


def test_text_is_one_screen_and_then_the_tables(run):
    done = run(WORKERS0)
    assert (done.returncode, done.stderr) == (0, "")
    screen, _, tables = done.stdout.partition("\n\nstep ")
    assert len(screen.splitlines()) <= 30
    assert "Tesla V100-DGXS-32GB, 34.1 GB, 3 steps of 180.9 ms on average" in screen
    assert "DataLoader      34.6 %    62.5 ms  ##############" in screen
    assert "34.6 %  load batches in worker processes: DataLoader(num_workers=2)" in screen
    assert "aten::cudnn_convolution_backward_weight" in tables
    assert "HtoD     pageable      6" in tables


def test_neither_torch_nor_numpy_is_needed(tmp_path):
    for name in ("torch", "numpy", "pandas"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not needed')")
    done = process(WORKERS0, "--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_is_a_list_by_rank_and_what_is_no_trace_is_passed_over(tmp_path, run, as_json):
    (tmp_path / "b.json").write_text(json.dumps({"not": "a trace"}))
    (tmp_path / "deep").mkdir()
    for rank in (1, 0):
        events = [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2, "tid": 1}]
        with gzip.open(tmp_path / "deep" / f"rank-{rank}.pt.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": events}, file)
    found = as_json(tmp_path)
    assert [trace["rank"] for trace in found] == [0, 1]
    text = run(tmp_path).stdout
    assert text.splitlines()[0].split()[:2] == ["rank", "file"]


def test_links_in_a_folder_are_not_followed(tmp_path, run, as_json):
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret.json"
    secret.write_bytes(gzip.decompress(WORKERS0.read_bytes()))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.json").symlink_to(secret)
    (folder / "b.json").symlink_to("../outside/secret.json")
    (folder / "c").symlink_to(outside)
    (folder / "d.json").symlink_to("/dev/zero")
    os.mkfifo(folder / "e.json")
    os.link(secret, folder / "f.txt")
    done = run(folder, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no trace in" in done.stderr
    assert as_json(folder / "a.json")["rank"] is None  # named by the user: that is no plant


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\x00\x01\x02", "is no JSON"),
        (b'{"traceEvents": [{"ph": "X", "na', "is cut off after 32 bytes"),
        (WORKERS0.read_bytes()[:5000], "is cut off after 5000 compressed bytes"),
        (WORKERS0.read_bytes()[:5000] + b"\x55" * 3000 + WORKERS0.read_bytes()[8000:], "is no sound trace: an event"),
        (b'{"traceEvents": [{"ph": "X" "cat": 1}]}', "an event is no JSON at byte 17"),
        (b'{"schemaVersion": 1}', "it has no traceEvents"),
        (b'{"traceEvents": []}', "no operator, runtime call or kernel"),
        (b"[" * 100_000, "nested more than 64 deep"),
    ],
)
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_file_that_cannot_be_read_is_a_clear_error(tmp_path, content, says, in_folder, run):
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    if in_folder:
        (tmp_path / "good.json.gz").write_bytes(WORKERS0.read_bytes())
    done = run(tmp_path if in_folder else file, "--json")
    if not in_folder:
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"telemetry: {file} ")
        assert says in done.stderr
    else:
        assert len(json.loads(done.stdout)) == 1
        assert done.returncode == (0 if "no traceEvents" in says or "no operator" in says else 1)
        assert (says in done.stderr) == bool(done.returncode)
    assert "Traceback" not in done.stderr


def test_what_is_no_file_is_a_clear_error(tmp_path, run):
    os.mkfifo(tmp_path / "fifo")
    for path, says in (
        (tmp_path / "none", "cannot be opened: No such file or directory"),
        ("/dev/zero", "is no regular file"),
        ("/proc/self/mem", "cannot be read: Input/output error"),
        (tmp_path / "fifo", "is no regular file"),
        (tmp_path, "there is no trace in"),
    ):
        done = run(path)
        assert (done.returncode, done.stdout) == (1, "")
        assert says in done.stderr
    assert run(WORKERS0, "--max-bytes", "1000").stderr.count("larger than 1000 bytes uncompressed") == 1
    assert run(WORKERS0, "--max-bytes", "-1").returncode == 2


def test_names_cannot_command_the_terminal(tmp_path, as_json):
    name = "evil\x1b]0;title\x07\x9b31m\u202e\n"
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "ts": 1, "dur": 2, "tid": 1},
        {"ph": "X", "cat": "kernel", "name": name, "ts": 1, "dur": 2, "tid": 1, "args": {"stream": 7}},
    ]
    file = tmp_path / "a\x1bb.json"
    file.write_text(json.dumps({"traceEvents": events}))
    for encoding in ("utf-8", "ascii"):
        done = process(file, PYTHONIOENCODING=encoding)
        assert done.returncode == 0
        assert not {c for c in done.stdout if not c.isprintable()} - {"\n"}
    assert as_json(file)["operators"][0]["name"] == name


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"'{sys.executable}' -m telemetry trace '{WORKERS0}' --json | head -c 10"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


RECORD = """
import sys, time, torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        end = time.perf_counter() + 0.004
        while time.perf_counter() < end:
            pass
        return torch.randn(8), index % 2

if __name__ == "__main__":
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    waits = {}
    workers = int(sys.argv[2])
    plan = schedule(wait=0, warmup=1, active=4, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, with_stack=workers > 0) as profiler:
        loader = iter(DataLoader(Slow(), batch_size=4, num_workers=workers))
        for step in range(5):
            start = time.perf_counter()
            x, y = next(loader)
            fetched = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            if not workers:
                waits[step] = fetched - start
            profiler.step()
    profiler.export_chrome_trace(sys.argv[1])
    import json
    print(json.dumps(waits))
"""


@pytest.mark.parametrize(("workers", "iterator"), [(0, "SingleProcess"), (2, "MultiProcessing")])
def test_a_live_recording_of_this_torch_shows_the_data_loader(tmp_path, workers, iterator, as_json):
    """In traces of newer torch the wait for a batch is an annotation, for which TensorBoard's tool shows 0."""
    script, file = tmp_path / "train.py", tmp_path / "rank7.pt.trace.json.gz"
    script.write_text(RECORD)
    done = subprocess.run(
        [sys.executable, str(script), str(file), str(workers)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    waits = [e for e in events if e.get("name", "").startswith("enumerate(DataLoader)#")]
    assert {e["cat"] for e in waits} == {"user_annotation"}
    assert all(iterator in e["name"] for e in waits)
    trace = as_json(file)
    assert [step["step"] for step in trace["steps"]] == [1, 2, 3, 4]
    assert trace["rank"] == 7
    assert trace["device"] is None
    assert set(trace["gpu"].values()) == {None}
    assert set(trace["temporal"].values()) == {None}
    for step in trace["steps"]:
        assert sum(step["categories"].values()) == pytest.approx(step["seconds"])
        assert step["categories"]["Kernel"] == 0
    if workers:
        return
    measured = json.loads(done.stdout)
    for step in trace["steps"]:  # what the loop itself saw; its next() does a little more than the annotation
        seen = measured[str(step["step"])]
        assert step["categories"]["DataLoader"] == pytest.approx(seen, rel=0.1)
    assert trace["average"]["categories"]["DataLoader"] > 0.5
    assert trace["advice"][0]["action"].startswith("load batches in worker processes")
