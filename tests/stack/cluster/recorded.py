"""Series of GPUs on a machine without a GPU: a run with every reading, and the series of a DCGM exporter.

The readings of the GPUs come through the real NVML binding from a fake driver below it. The exposition is the agent's
own, and one endpoint serves it like a node. Half of DCGM's metrics have their names from before 4.9, half the new ones.
"""

import contextlib
import dataclasses
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fakes import nvml

from benchmarks.fleet_ranks import Node, SimulatedRank
from stack.jobs import wait_for
from telemetry.model.records import CollectorHealth
from telemetry.sources.collector import CollectorError
from telemetry.sources.gpu import GpuSource
from telemetry.sources.nvml import Nvml

RUN, NODE = "recorded", "recorded-node"
POWER_CAP = 4
"""The bit of the throttle reason that is not a fault."""

DCGM = """\
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="{0}",device="nvidia0",Hostname="{node}"}} 80
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{{gpu="0",UUID="{0}",device="nvidia0",Hostname="{node}"}} 0.61
# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{gpu="0",UUID="{0}",device="nvidia0",Hostname="{node}"}} 0.31
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{{gpu="0",UUID="{0}",device="nvidia0",Hostname="{node}"}} 0
# TYPE DCGM_FI_DEV_GPU_UTIL_RATIO gauge
DCGM_FI_DEV_GPU_UTIL_RATIO{{gpu="1",gpu_uuid="{1}",hostname="{node}"}} 0.8
# TYPE DCGM_FI_PROF_SM_UTIL_RATIO gauge
DCGM_FI_PROF_SM_UTIL_RATIO{{gpu="1",gpu_uuid="{1}",hostname="{node}"}} 0.62
# TYPE DCGM_FI_PROF_TENSOR_UTIL_RATIO gauge
DCGM_FI_PROF_TENSOR_UTIL_RATIO{{gpu="1",gpu_uuid="{1}",hostname="{node}"}} 0.32
# TYPE DCGM_FI_DEV_XID_ERROR gauge
DCGM_FI_DEV_XID_ERROR{{gpu="1",gpu_uuid="{1}",hostname="{node}"}} 79
"""


def read_gpus():
    """Two GPUs as the NVML source reports them: one with hardware counters at its power cap, one without counters."""
    traffic = {60: 90_000.0, 61: 90_000.0, 20: 1_000.0, 21: 2_000.0}  # MiB per second of NVLink and PCIe
    gpus = [
        nvml.Gpu(uuid="GPU-recorded-0", gpm=True, gpm_values=nvml.Gpu().gpm_values | traffic, throttle=POWER_CAP),
        nvml.Gpu(uuid="GPU-recorded-1", name="NVIDIA Fake A100"),
    ]
    samples = []
    with nvml.installed(nvml.State(gpus=gpus)):
        for gpu in gpus:
            source = GpuSource(Nvml(), lambda gpu=gpu: [gpu.uuid], interval_seconds=0.15)
            with contextlib.closing(source):
                samples.append(
                    wait_for(f"a reading of {gpu.uuid}", lambda source=source, gpu=gpu: whole(source, gpu.gpm))
                )
    return samples


def whole(source, counters):
    """A sample with SM activity, if the GPU has counters: that needs two readings."""
    try:
        (sample,) = source.read()
    except CollectorError:
        return None
    return sample if sample.sm_active_ratio is not None or not counters else None


class Recorded:
    """The endpoint, and the target file with its address."""

    def __init__(self, targets):
        self.gpus = read_gpus()
        began = time.time() - 600
        ranks = [
            SimulatedRank(RUN, rank, NODE, rank, 2, began, waits=0.1, cause="host_bound")
            for rank in range(len(self.gpus))
        ]
        self._node = Node(ranks)
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.end_headers()
                self.wfile.write(endpoint.text())

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="recorded", daemon=True).start()
        target = [{"targets": [f"127.0.0.1:{self.port}"], "labels": {"node": NODE}}]
        self._file = targets / f"{RUN}-0123456789ab.{NODE}.json"
        whole = targets / f"{RUN}.tmp"
        whole.write_text(json.dumps(target))
        whole.replace(self._file)

    def text(self):
        views = []
        for rank, gpu in zip(self._node.ranks, self.gpus, strict=True):
            view = rank.view(time.time(), gpu)
            failed = CollectorHealth("pressure", False, 0.001, "made up")
            collectors = (*view.collectors[:4], failed)
            views.append(dataclasses.replace(view, errors={"collect.pressure": 1}, collectors=collectors))
        return self._node.expose(views) + DCGM.format(*(gpu.uuid for gpu in self.gpus), node=NODE).encode()

    def close(self):
        self._file.unlink()
        self._server.shutdown()
        self._server.server_close()
