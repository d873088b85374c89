"""What the doctor finds, in surroundings that are made to be well or ill."""

import os
import socket
import subprocess
import sys
import threading

import pytest
import torch
from fakes import nvml as fake
from fakes.nvml import Gpu, Mig, State

from telemetry import doctor as module
from telemetry.config import Config
from telemetry.doctor import ABSENT, OK, PROBLEM, WIDTH, CheckContext, Finding, doctor, examine, render
from telemetry.safety import threads
from tests.running_agent import wait_for


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    """No settings of the person who runs the tests, a free port for the endpoint, and an empty current folder."""
    for name in [name for name in os.environ if name.startswith("TELEMETRY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TELEMETRY_PORT", "0")
    monkeypatch.chdir(tmp_path)


def found(name, run_dir=None):
    findings = [finding for finding in examine(run_dir) if finding.name == name]
    assert findings, f"no finding of that name: {name}"
    return findings[0]


def test_a_machine_that_is_well(tmp_path, capsys):
    before = set(os.listdir(tmp_path))
    assert doctor(str(tmp_path / "run")) == 0
    printed = capsys.readouterr()
    assert "no problem found" in printed.out
    assert printed.err == ""
    assert set(os.listdir(tmp_path)) == before  # it leaves nothing behind


@pytest.mark.parametrize(
    ("variable", "value", "name", "status", "text"),
    [
        ("PORT", "off", "endpoint", ABSENT, "turned off by the setting port"),
        ("HOST", "192.0.2.1", "endpoint", PROBLEM, "TELEMETRY_HOST"),
        ("GPU_EVENTS", "off", "cuda events", ABSENT, "turned off by the setting gpu_events"),
        (
            "INTERVAL_SECONDS",
            "soon",
            "settings",
            PROBLEM,
            "interval_seconds (from TELEMETRY_INTERVAL_SECONDS) = 'soon'",
        ),
        ("PROT", "1", "settings", ABSENT, "TELEMETRY_PROT"),
        ("DISABLED", "yes", "enabled", PROBLEM, "TELEMETRY_DISABLED=yes turns everything off; unset it"),
    ],
)
def test_settings_from_the_environment(monkeypatch, tmp_path, variable, value, name, status, text):
    monkeypatch.setenv(f"TELEMETRY_{variable}", value)
    monkeypatch.setenv("TELEMETRY_RUN_DIR", str(tmp_path / "theirs"))
    findings = examine(str(tmp_path / "mine"))
    assert any((f.name, f.status) == (name, status) and text in f.text for f in findings)
    assert any(f"{tmp_path}/mine can be created" in f.text for f in findings)


@pytest.mark.parametrize(("cores", "status"), [(range(64), OK), (range(2), PROBLEM)])
def test_more_threads_than_cores(monkeypatch, cores, status):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    finding = found("threads")
    assert finding.status == status
    assert "32 threads" in finding.text
    assert ("OMP_NUM_THREADS=2" in finding.text) == (status == PROBLEM)


@pytest.mark.parametrize(
    ("versions", "name", "text"),
    [
        ({"torch": "2.3.1+cu121"}, "versions", "2.4 or newer"),
        ({"torch": None}, "versions", "pip install torch"),
        (dict.fromkeys(module.NEEDED), "packages", "pip install structlog psutil msgspec prometheus-client"),
        ({"pynvml": "11.5.3"}, "packages", "pip uninstall pynvml"),  # it overwrites the binding
    ],
)
def test_packages_that_are_missing_or_too_old(monkeypatch, versions, name, text):
    monkeypatch.setattr(module, "version_of", lambda package: versions.get(package, "99.0"))
    assert any((f.name, f.status) == (name, PROBLEM) and text in f.text for f in examine(None))


def test_a_python_without_its_gil(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert found("versions").status == PROBLEM
    assert "GIL is off" in found("versions").text


def test_a_port_that_is_taken_and_one_that_is_free(monkeypatch):
    """The free one lingers in TIME_WAIT, which does not hinder the endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", taken))
        server.accept()[0].close()
        client.close()
        monkeypatch.setenv("TELEMETRY_PORT", str(taken))
        finding = found("endpoint")
    assert finding.status == ABSENT
    assert f"port {taken} is taken on 127.0.0.1;" in finding.text
    assert taken < int(finding.text.rpartition("port ")[2].split()[0]) <= taken + 63
    assert found("endpoint") == Finding(OK, "endpoint", f"port {taken} is free on 127.0.0.1")


def test_a_run_folder_that_cannot_be_used(tmp_path, monkeypatch):
    assert found("settings", "").status == PROBLEM
    (tmp_path / "file").touch()
    for folder in ("file", "file/run"):
        finding = found("run folder", str(tmp_path / folder))
        assert finding.status == PROBLEM
        assert "is a file" in finding.text
    usage = module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    finding = found("run folder", str(tmp_path))
    assert finding.status == PROBLEM
    assert "1.0 MiB free" in finding.text


def test_gpus_are_read_by_the_reader_of_the_agent():
    """Identical ones share a line; one that is lost hides no other."""
    pytest.importorskip("pynvml")
    hopper = [Gpu(uuid=f"GPU-{n}", name="Fake H100", gpm=True) for n in range(3)]
    parts = Gpu(uuid="GPU-8", mig_enabled=True, mig=[Mig(name="Fake H100 MIG 1g.10gb")])
    old = Gpu(uuid="GPU-9", name="Fake V100")
    with fake.installed(State(gpus=[*hopper, Gpu(lost=True), parts, old])) as state:
        findings = [finding for finding in examine(None) if finding.name == "gpu"]
        wait_for(lambda: "telemetry-nvml" not in threads.running())
    assert (state.initialised, state.gpm_buffers, state.event_sets) == (0, {}, {})
    lines = {finding.text.partition(",")[0]: (finding.status, finding.text) for finding in findings}
    assert [(name, status) for name, (status, _) in lines.items()] == [
        ("0-2: Fake H100", OK), ("4: Fake H100 MIG 1g.10gb", ABSENT), ("5: Fake V100", ABSENT),
        ("3: nvmlDeviceGetHandleByIndex: GPU is lost; run nvidia-smi -q for details", PROBLEM),
    ]  # fmt: skip
    assert "driver 570.00; SM activity is read from hardware counters" in lines["0-2: Fake H100"][1]


def test_no_driver_and_one_that_hangs(monkeypatch):
    pytest.importorskip("pynvml")
    with fake.no_driver():
        missing = "no NVIDIA driver: libnvidia-ml.so.1 is missing: there are no GPU metrics"
        assert found("gpu") == Finding(ABSENT, "gpu", missing)
    monkeypatch.setattr(module, "_DRIVER_SECONDS", 0.05)
    state = State()
    with fake.installed(state):
        release = state.hang_in("nvmlInitWithFlags")
        finding = found("gpu")
        release.set()
        wait_for(lambda: "telemetry-nvml" not in threads.running())
    assert finding.status == PROBLEM
    assert "an NVML call has not returned for over 0.05 s (nvmlInit); run nvidia-smi" in finding.text


def test_a_gpu_that_torch_cannot_use_and_cuda_that_hangs(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    ((status, text),) = module.check_cuda_events(CheckContext(Config.load({}, environ={}), gpus=True))
    assert status == PROBLEM
    assert "install a CUDA build" in text
    release = threading.Event()
    monkeypatch.setattr(module, "_time_with_events", lambda gpus: release.wait())
    monkeypatch.setattr(module, "_CUDA_SECONDS", 0.1)
    finding = found("cuda events")
    release.set()
    for thread in threading.enumerate():
        if thread.name == "telemetry-doctor-cuda":
            thread.join(5)
    assert finding.status == PROBLEM
    assert "has not answered" in finding.text


@pytest.mark.gpu
def test_events_on_a_real_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    assert found("cuda events").status == OK


def test_a_torch_without_a_name_that_the_agent_patches(monkeypatch):
    assert found("torch").status == OK
    monkeypatch.delattr("torch.utils.data._utils.worker._worker_loop")
    finding = found("torch")
    assert finding.status == ABSENT
    assert "torch.utils.data._utils.worker has no _worker_loop; absent: fetches of workers" in finding.text


def test_findings_fit_the_terminal():
    lines = render([Finding(PROBLEM, f"name {n}", "a long word or two " * 30) for n in range(3)]).splitlines()
    assert [line[:9] for line in lines[:-1:2]] == ["!! name 0", "!! name 1", "!! name 2"]
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1].startswith("3 problems, see the lines with !!")


def test_a_check_that_fails_is_a_finding(monkeypatch, capsys):
    def check_the_weather(place):
        raise RuntimeError("it\nrains")

    monkeypatch.setattr(module, "CHECKS", (check_the_weather,))
    assert doctor(None) == 1
    assert capsys.readouterr().out.startswith("!! the weather this check failed itself: RuntimeError: it rains\n")


def test_torch_without_numpy_is_no_noise(tmp_path):
    """torch warns when it is imported without NumPy, which telemetry does not need."""
    without = "import sys; sys.modules['numpy'] = None; sys.argv = ['telemetry', 'doctor']; "
    command = [sys.executable, "-c", without + "from telemetry.__main__ import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=120)
    assert "cuda events" in done.stdout
    assert done.stderr == ""


def test_what_the_kernel_does_not_report(monkeypatch, tmp_path):
    (tmp_path / "zeros").write_text("0 0 0\n")  # /proc/self/schedstat without CONFIG_SCHED_INFO
    (tmp_path / "told").write_text("1 0 0\n")
    files = {str(tmp_path / name): ("works", "it is lost") for name in ("zeros", "missing", "told")}
    monkeypatch.setattr(module, "_KERNEL", files)
    statuses = [(finding.status, "lost" in finding.text) for finding in examine(None) if finding.name == "kernel"]
    assert statuses == [(ABSENT, True), (ABSENT, True), (OK, False)]
