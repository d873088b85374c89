"""Too little space in the run folder, in TMPDIR or in /dev/shm: the training ends as without the agent.

So does another training on the machine that needs /dev/shm for its own batches.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from faults.mounts import small_disk
from faults.processes import environment, results, write

HANG = 240.0

TRAIN = """
import os, shutil, sys, time, torch, telemetry
from torch.utils.data import DataLoader, TensorDataset

place, ours = sys.argv[1], sys.argv[2] == "ours"
folder = {"run": "run", "tmp": "tmp/here", "shm": "/dev/shm/torch-telemetry-%d" % os.getuid()}[place]
room = {"run": "run", "tmp": "tmp", "shm": "/dev/shm"}[place]
total = 0.0
agent = None
if ours:
    limit = {"snapshot_max_bytes": 1 << 20} if place == "shm" else {}
    agent = telemetry.start("run", start_line=False, interval_seconds=0.1, log_interval_seconds=0.1, **limit)


def train(until):
    global total
    step = 0
    while step < 20 or not until():
        for (batch,) in DataLoader(TensorDataset(torch.ones(20, 4)), batch_size=4):
            for _ in range(4000):
                torch.relu(batch)
            time.sleep(0.02)
            step += 1
            total += float(batch.sum()) if step <= 20 else 0.0


def snapshot():
    "One more snapshot has been taken, or has failed."
    if agent is None:
        return True
    telemetry.request_snapshot(steps=5)
    return sum(agent.snapshots.counts.values()) > before


def fill():
    with open(os.path.join(room, "filler"), "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass


for state in ("tiny", "full", "removed"):
    before = sum(agent.snapshots.counts.values()) if ours else 0
    if state == "full":
        fill()
    if state == "removed":
        os.unlink(os.path.join(room, "filler"))
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            path = os.path.join(folder, name)
            shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)
        if place != "run":  # that one is mounted
            shutil.rmtree(folder, ignore_errors=True)
        print("emptied", flush=True)
    end = time.monotonic() + (2 if ours else 0)
    train(snapshot if state != "removed" else lambda: time.monotonic() > end)
    print(state, total, flush=True)
    sys.stdin.readline()
print("to the end", file=sys.stderr)
sys.exit(3)
"""

NEIGHBOUR = """
import select, sys, torch
from torch.utils.data import DataLoader


class Large(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((65536,), float(index))


order = ""
while order != "end":
    asked = select.select([sys.stdin], [], [], 0.5)[0]
    assert [float(batch[0, 0]) for batch in DataLoader(Large(), num_workers=1)] == list(range(64))
    if asked:
        order = sys.stdin.readline().strip()
        print("on", flush=True)
        if order == "rest":
            sys.stdin.readline()
"""

DRIVER = """
import json, os, subprocess, sys
from pathlib import Path

place, who = sys.argv[1:]
os.makedirs("tmp/here", exist_ok=True)
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
neighbour = subprocess.Popen([sys.executable, "neighbour.py"], **pipes)


def tell(process, what):
    try:
        process.stdin.write(what + "\\n")
        process.stdin.flush()
    except OSError:
        pass  # it has ended: what it says is missing


def ask(what):
    "The neighbour answers when it has read an epoch."
    tell(neighbour, what)
    return neighbour.stdout.readline()


heard = [ask("tell")]
train = subprocess.Popen([sys.executable, "train.py", place, who],
                         env=os.environ | {"TMPDIR": os.path.abspath("tmp/here")}, **pipes)
tiny = train.stdout.readline()
# Nobody's batches pass through a /dev/shm that is full, with or without the agent. So there the neighbour rests.
heard += [ask("tell"), ask("rest" if place == "shm" else "tell")]
tell(train, "go")
full = train.stdout.readline()
if place != "shm":
    heard[-1] = ask("tell")
tell(train, "go")
emptied = train.stdout.readline()
if place == "shm":
    tell(neighbour, "go")
removed = train.stdout.readline()
heard += [ask("tell"), ask("end")]
_, told = neighbour.communicate(timeout=100)
tell(train, "go")
rest, stderr = train.communicate(timeout=100)
Path("results.json").write_text(json.dumps({
    "train": [train.returncode, tiny + full + emptied + removed + rest, stderr],
    "neighbour": [neighbour.returncode, heard, told],
}))
"""


def outcome(folder: Path, place: str, who: str) -> dict:
    for name in ("run", "tmp"):
        (folder / name).mkdir()
    write(folder, "train.py", TRAIN)
    write(folder, "neighbour.py", NEIGHBOUR)
    driver = write(folder, "driver.py", DRIVER)
    sizes = {"run": {"run": "3m"}, "tmp": {"tmp": "1m"}, "shm": {"/dev/shm": "6m"}}[place]
    done = subprocess.run(
        small_disk(sizes, driver, place, who),
        cwd=folder,
        env=environment(TELEMETRY_RUN="r"),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return results(folder)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return outcome(tmp_path_factory.mktemp("bare"), "run", "bare")


@pytest.mark.parametrize("place", ["run", "tmp", "shm"])
def test_without_room_the_training_and_its_neighbour_end_as_ever(place, tmp_path, bare):
    """Each place in turn is tiny, full, or emptied by other code, and a snapshot is larger than its space."""
    assert bare["train"][0] == 3
    assert bare["neighbour"] == [0, ["on\n"] * 5, ""]
    found = outcome(tmp_path, place, "ours")
    assert found == bare
    told = [json.loads(line) for path in tmp_path.glob("run/logs/*.jsonl") for line in path.read_text().splitlines()]
    snapshots = [line for line in told if line["event"] == "snapshot"]
    if place == "tmp":
        assert snapshots[0]["result"] == "recorded"
    if place == "shm":
        assert "more than snapshot_max_bytes" in snapshots[0]["why"]


def test_a_run_folder_in_the_place_of_a_disk_that_is_too_small_is_told(tmp_path):
    """The log gives the reason: the maximum size of the trace, the space that must stay free, and the free space."""
    (tmp_path / "disk").mkdir()
    script = write(
        tmp_path,
        "script.py",
        """
        import torch, telemetry
        from torch.utils.data import DataLoader, TensorDataset
        agent = telemetry.start("disk/run", start_line=False, interval_seconds=0.1)
        telemetry.request_snapshot(steps=2)
        while not sum(agent.snapshots.counts.values()):
            for (batch,) in DataLoader(TensorDataset(torch.ones(200, 4)), batch_size=4):
                torch.relu(batch)
        telemetry.stop()
        with open("disk/run/logs/" + __import__("os").listdir("disk/run/logs")[0]) as log:
            print(next(line for line in log if '"snapshot"' in line and '"why"' in line))
        """,
    )
    command = small_disk({"disk": "64m"}, script)
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stderr) == (0, "")
    line = json.loads(done.stdout)
    assert line["result"] == "failed"
    assert "1024 MiB must stay free, and 6" in line["why"]
