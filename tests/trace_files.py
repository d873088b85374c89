"""Trace files that are small enough to be checked by hand."""

from __future__ import annotations

import json


def x(cat, name, ts, dur, tid=1, **args):
    keys = {"external": "External id", "blocks": "blocks per SM", "occupancy": "est. achieved occupancy %"}
    args = {keys.get(key, key.replace("_", " ") if key.startswith("Input") else key): v for key, v in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def step(number, ts, dur):
    return x("user_annotation", f"ProfilerStep#{number}", ts, dur)


def launch(ts, correlation, dur=2, name="cudaLaunchKernel", external=-1, tid=1):
    return x("cuda_runtime", name, ts, dur, tid, correlation=correlation, external=external)


def kernel(ts, dur, correlation, stream=7, name="k", cat="kernel", external=-1, device=0, **args):
    return x(cat, name, ts, dur, 7, stream=stream, correlation=correlation, external=external, device=device, **args)


def write(tmp_path, events, name="t.json", **head):
    path = tmp_path / name
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return path
