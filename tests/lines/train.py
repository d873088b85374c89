"""A training script with a planted hot line, and timers of its own around it.

    python -m tests.lines.train KIND [--without] [--seconds S] [--answer FILE]

``# hot: KIND`` marks the planted line, here or in `planted_kinds`. The rest of a batch takes about half as long. With
``--without`` the hot line is left out. The answer has the steps per second, and the hot line's share of a fetch (or of
the waits, the sampler, the step, a checkpoint), both by the script's own clock. The kinds in `RANKS` run under torchrun.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import telemetry
from tests.lines.planted_kinds import KINDS, NUMBERS, RANKS, SlowSampler, busy, clock, quiet, slow_collate

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM_UP_SECONDS = 3.0


def stream(*, without: bool) -> Iterator[torch.Tensor]:
    """A data source that is not a DataLoader."""
    while True:
        began = clock()
        if not without:
            sorted(NUMBERS)  # hot: watched
        spent = clock() - began
        busy(200_000)
        yield torch.tensor([spent, clock() - began, 0.0], dtype=torch.float64)


def step_together(*, hot: bool, over: bool) -> tuple[float, bool]:
    """The rest of a step of a job. Returns the seconds of the hot line, and whether the job is over for all ranks."""
    at = clock()
    if hot:
        sorted(NUMBERS)  # hot: straggler
    spent = clock() - at
    quiet(12)
    ends = torch.tensor([float(over)])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return spent, bool(ends)


def main() -> None:
    """Train for some seconds, and write the answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*KINDS])
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--answer", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind = KINDS[options.kind](without=options.without)
    slow_collate.without = options.without  # type: ignore[attr-defined]
    sampler = SlowSampler(without=options.without) if options.kind == "sampler" else None
    batches: Any = DataLoader(
        kind,
        batch_size=kind.batch_size,
        num_workers=kind.workers,
        sampler=sampler,
        collate_fn=kind.collate,
        multiprocessing_context=kind.start_method if kind.workers else None,
    )
    if options.kind == "watched":
        batches = telemetry.watch(stream(without=options.without))
    weights = torch.rand(300, 300, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.0)
    slow = True
    if options.kind in RANKS:
        dist.init_process_group("gloo")
        slow = dist.get_rank() == RANKS[options.kind] - 1
    hot = whole = second = 0.0
    over = False
    steps, began, steady = 0, clock(), 0.0
    kept = [[number] for number in range(1_000)] if options.kind == "gc_step" else []
    with tempfile.TemporaryDirectory() as folder:
        started = clock()
        for batch in batches:
            for _ in range(2):
                loss = (weights @ weights).sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            at = clock()
            if options.kind == "gc_step" and not options.without:
                gc.collect()  # hot: gc_step
            if options.kind == "checkpoint":
                with telemetry.phase("checkpoint"):
                    if not options.without:
                        sorted(NUMBERS)  # hot: checkpoint
                    spent = clock() - at
                    torch.save(weights, os.path.join(folder, "state.pt"))
                    quiet(15)
                hot, whole = hot + spent, whole + clock() - at
            elif options.kind == "gc_step":
                hot, whole = hot + clock() - at, whole + clock() - started
            elif options.kind in RANKS:
                spent, over = step_together(hot=slow and not options.without, over=clock() - began >= options.seconds)
                hot, whole = hot + spent, whole + clock() - started
            else:
                hot, whole, second = hot + float(batch[0]), whole + float(batch[1]), second + float(batch[2])
            started = clock()
            steps += 1
            if not steady and started - began >= WARM_UP_SECONDS:
                steady, steps = started, 0
                hot = whole = second = 0.0
            over = over or (options.kind not in RANKS and started - began >= options.seconds)
            if over:
                break
    if sampler is not None:
        hot, whole = sampler.spent, sampler.whole
    del kept
    answer = {
        "steps_per_second": steps / (started - steady),
        "share": hot / whole if whole else None,
        "second_share": second / whole if second else None,
    }
    if options.answer is not None and slow:
        options.answer.write_text(json.dumps(answer), encoding="utf-8")
    print(answer)


if __name__ == "__main__":
    main()
