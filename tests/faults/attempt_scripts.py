"""A training that is killed, fails and is started again, and the books that its own stamps give."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

TRAIN = """
    import atexit, json, os, sys, time, torch
    from tests.quick_optimizers import CountingSGD

    END = os.environ["END"]  # how this attempt is to end: step, checkpoint, restore, exception, status, finish
    stamps = open(f"stamps-{os.environ['ATTEMPT']}.jsonl", "a", buffering=1)
    started_from = 0

    def stamp(what, **fields):
        stamps.write(json.dumps({"what": what, "at": time.time()} | fields) + "\\n")

    def blocked():
        stamp("blocked")
        print("blocked", flush=True)
        sys.stdin.readline()

    class Slow:  # takes its time to be saved and loaded
        def __getstate__(self):
            if END == "checkpoint" and net_step > 20 + started_from:
                blocked()
            time.sleep(0.1)
            return {"x": 1}

        def __setstate__(self, state):
            if END == "restore":
                blocked()
            time.sleep(0.3)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 90

        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.randn(16)

    atexit.register(lambda: stamp("bye"))
    net = torch.nn.Linear(16, 1)
    optimizer = CountingSGD(net.parameters())
    net_step = 0
    if os.path.exists("checkpoint.pt"):
        stamp("loads")
        state = torch.load("checkpoint.pt", weights_only=False)
        stamp("loaded")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        net_step = started_from = state["step"]
    stamp("starts", step=net_step)
    batches = iter(torch.utils.data.DataLoader(Data(), batch_size=1))
    number = 0
    while True:
        stamp("asks", number=number + 1)
        try:
            batch = next(batches)
        except StopIteration:
            break
        number += 1
        stamp("got", number=number)
        if number <= started_from:
            continue
        if END == "step" and number == started_from + 17:
            blocked()
        time.sleep(0.03)
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        net_step = number
        if number % 10 == 0:
            stamp("saves")
            torch.save(
                {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": number, "slow": Slow()}, "new.pt"
            )
            stamp("saved")
            os.replace("new.pt", "checkpoint.pt")
        if END == "exception" and number == started_from + 13:
            raise ValueError("as told")
        if END == "status" and number == started_from + 14:
            sys.exit(3)
    stamp("ends")
"""


@dataclass
class Attempted:
    """One process of the script: when it was started and when it was gone, and its stamps."""

    begin: float
    end: float
    killed: bool
    stamps: list[dict]
    tail: float = 0.0  # from the newest heartbeat to the kill: nobody knows of it
    books: dict[str, float] = field(default_factory=dict)

    @property
    def resumed(self) -> int | None:
        """The step it began at; None if it did not come so far."""
        return next((stamp["step"] for stamp in self.stamps if stamp["what"] == "starts"), None)

    @property
    def done(self) -> int:
        """The last step whose optimizer has stepped."""
        asked = [stamp["number"] for stamp in self.stamps if stamp["what"] == "asks"]
        in_the_way = self.killed and self.stamps[-1]["what"] == "blocked" and self.stamps[-2]["what"] == "got"
        if not asked:
            return 0
        trained = asked[-1] - (1 if in_the_way or self.stamps[-1]["what"] == "ends" else 0)
        ended = [stamp for stamp in self.stamps if stamp["what"] == "ends"]
        return asked[-1] - 1 if ended else trained


def read_stamps(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected(attempts: list[Attempted]) -> dict[str, float]:
    """Seconds by category, from the scripts' own stamps."""
    total: dict[str, float] = {}
    for index, attempt in enumerate(attempts):
        later = next((other.resumed for other in attempts[index + 1 :] if other.resumed is not None), None)
        kept = later if later is not None and attempt.stamps[-1]["what"] != "ends" else 1 << 30
        for category, seconds in books_of(attempt, kept).items():
            total[category] = total.get(category, 0.0) + seconds
        if index:
            gap = attempt.begin - _end(attempts[index - 1])
            total["down"] = total.get("down", 0.0) + gap + attempts[index - 1].tail
    return total


def _end(attempt: Attempted) -> float:
    bye = [stamp["at"] for stamp in attempt.stamps if stamp["what"] == "bye"]
    return bye[0] if bye else attempt.end


CATEGORIES = (
    "productive", "data_wait", "redone", "restore", "replay", "startup", "evaluation", "checkpoint", "stuck"
)  # fmt: skip
LOOP = {"productive", "data_wait", "redone", "replay"}


def books_of(attempt: Attempted, kept: int, stuck_seconds: float = math.inf) -> dict[str, float]:
    """Go from stamp to stamp. The time before each belongs to what went on then.

    Args:
        attempt: of one process.
        kept: its last step that was not lost.
        stuck_seconds: as in the settings. The script has a stamp wherever the agent sees it go on.
    """
    books = dict.fromkeys(CATEGORIES, 0.0)
    at, doing, number, first = attempt.begin, "startup", 0, True
    resumed = attempt.resumed or 0
    moments = [stamp for stamp in attempt.stamps if stamp["what"] != "bye"]
    for stamp in [*moments, {"what": "over", "at": _end(attempt) - attempt.tail}]:
        seconds = max(0.0, stamp["at"] - at)
        books["stuck" if doing in LOOP and seconds >= stuck_seconds else doing] += seconds
        at, what = stamp["at"], stamp["what"]
        if what == "loads":
            doing = "restore"
        elif what == "loaded":
            doing = "startup"
        elif what == "asks":
            number = stamp["number"]
            waits = "replay" if number <= resumed else "data_wait" if number <= kept else "redone"
            doing = "startup" if first else waits
            first = False
        elif what in {"got", "saved", "evaluated"}:
            doing = "replay" if number <= resumed else "productive" if number <= kept else "redone"
        elif what == "saves":
            doing = "checkpoint"
        elif what == "evaluates":
            doing = "evaluation"
    return books


ELASTIC = """
    import os, signal, sys, time, torch
    import torch.distributed as dist
    from tests.quick_optimizers import CountingSGD

    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # A store of its own: in the launcher's, gloo finds the addresses of the attempt before.
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store-{attempt}", rank=rank, world_size=2)
    net = torch.nn.Linear(16, 1)
    optimizer = CountingSGD(net.parameters())
    step = 0
    if os.path.exists("checkpoint.pt"):
        state = torch.load("checkpoint.pt")
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    first = step
    for batch in torch.utils.data.DataLoader(torch.randn(1000, 16)):
        net(batch).sum().backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(0.02)
        if step % 10 == 0 and rank == 0:
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "new.pt")
            os.replace("new.pt", "checkpoint.pt")
        if step == 13 and attempt == 0 and rank == 1:
            raise ValueError("as told")
        if step == 25 and attempt == 1 and rank == 1:
            time.sleep(1.5)  # longer than a heartbeat takes
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 40:
            break
    dist.destroy_process_group()
"""
