"""What input shapes cost in a snapshot: the same steps, recorded with and without ``snapshot_shapes``, in turns.

The loop is a small transformer on the CPU with AdamW: most of its time is spent on the host's way to many short
operators, as in a step that cannot keep a GPU busy. So this is close to the most that a real step would feel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

_MODES = ("off", "plain", "shapes")
_HEADINGS = "| | not recorded | recorded | with `snapshot_shapes` |\n| --- | --- | --- | --- |"
_ROWS = (("a step", "step"), ("to stop the recording", "stop"), ("to save the trace", "save"))


def measure(*, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Milliseconds of each step and of each part of a snapshot, bytes of each trace, by mode."""
    import torch

    from telemetry.snapshot import agree
    from telemetry.snapshot.capture import Session
    from telemetry.util.processes import Identity

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    net = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    batch = torch.randn(4, 16, 64)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        net(batch).sum().backward()
        optimizer.step()
        return 1e3 * (time.perf_counter() - start)

    for _ in range(20):
        step()
    request = agree.Request("1-a", agree.API, agree.REQUEST, None, steps, "a measurement")
    plan = agree.Plan(request, None, 1, steps, (0,), "x-step1", 1)
    identity = Identity("a measurement", 0, 0, 1, "n", 1, "plain")
    found: dict[str, Any] = {mode: {"step": [], "stop": [], "save": [], "bytes": []} for mode in _MODES}
    for number in range(rounds):
        for mode in _MODES[number % 3 :] + _MODES[: number % 3]:
            rows = found[mode]
            if mode == "off":
                rows["step"] += [step() for _ in range(steps)]
                continue
            session = Session(plan, identity, shapes=mode == "shapes")
            session.prepare()
            session.start()
            rows["step"] += [step() for _ in range(steps)]
            start = time.perf_counter()
            trace = session.stop()
            rows["stop"].append(1e3 * (time.perf_counter() - start))
            rows["save"].append(1e3 * trace.save(folder / "trace.json"))
            rows["bytes"].append((folder / "trace.json").stat().st_size)
            trace.free()
    return found


def main() -> None:
    """Print a table, and write all figures if a file is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="telemetry-bench-") as folder:
        found = measure(rounds=chosen.rounds, steps=chosen.steps, folder=Path(folder))
    if chosen.json:
        chosen.json.write_text(json.dumps(found))
    print(_HEADINGS)
    for title, part in (*_ROWS, ("bytes of the trace", "bytes")):
        cells = [_cell(found[mode][part], "" if part == "bytes" else "ms") for mode in _MODES]
        print(f"| {title} | " + " | ".join(cells) + " |")


def _cell(values: list[float], unit: str) -> str:
    """The median, and the quartiles behind it."""
    if not values:
        return "-"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3g} {unit} ({low:.3g} to {high:.3g})" if unit else f"{middle:.0f}"


if __name__ == "__main__":
    main()
