"""What the doctor finds, in surroundings that are made to be well or ill."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from fakes import nvml as fake
from fakes.nvml import Gpu, State

from telemetry import doctor as module
from telemetry.config import Config
from telemetry.doctor import ABSENT, HEIGHT, OK, PROBLEM, WIDTH, CheckContext, Finding, doctor, examine, render
from telemetry.sources.collector import CollectorError

ROOT = Path(__file__).parents[1]


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


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_machine_that_is_well(tmp_path, capsys):
    before = set(os.listdir(tmp_path))
    assert doctor(str(tmp_path / "run")) == 0
    printed = capsys.readouterr()
    assert "no problem found" in printed.out
    assert PROBLEM not in printed.out.splitlines()[0]
    assert printed.err == ""
    assert set(os.listdir(tmp_path)) == before  # it leaves nothing behind


def test_every_check_finds_something():
    names = {finding.name for finding in examine(None)}
    expected = {"enabled", "settings", "versions", "packages", "gpu", "cuda events", "endpoint", "run folder"}
    assert names == expected | {"board", "workers", "threads", "schedstat", "pressure", "cgroup", "memory"}


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
def test_settings_from_the_environment(monkeypatch, capsys, tmp_path, variable, value, name, status, text):
    monkeypatch.setenv(f"TELEMETRY_{variable}", value)
    findings = examine(str(tmp_path / "mine"))
    assert any((f.name, f.status) == (name, status) and text in f.text for f in findings)
    assert any(f"{tmp_path}/mine can be created" in f.text for f in findings)
    problems = sum(f.status == PROBLEM for f in findings)
    monkeypatch.setattr(module, "examine", lambda run_dir: findings)
    assert doctor(None) == int(problems > 0)
    assert ("1 problem, see the lines with !!" in capsys.readouterr().out) == (problems == 1)


@pytest.mark.parametrize(("cores", "status"), [(range(64), OK), (range(2), PROBLEM)])
def test_more_threads_than_cores(monkeypatch, cores, status):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    finding = found("threads")
    assert finding.status == status
    assert "32 threads" in finding.text
    assert ("OMP_NUM_THREADS=2" in finding.text) == (status == PROBLEM)


def test_a_run_folder_without_a_name():
    assert found("settings", "").status == PROBLEM


@pytest.mark.parametrize(
    ("versions", "name", "text"),
    [
        ({"torch": "2.3.1+cu121"}, "versions", "2.4 or newer"),
        (dict.fromkeys(["torch", *module.NEEDED]), "versions", "pip install torch"),
        (
            dict.fromkeys(["torch", *module.NEEDED]),
            "packages",
            "pip install structlog psutil msgspec prometheus-client",
        ),
        ({"pynvml": "11.5.3"}, "packages", "pip uninstall pynvml"),  # it overwrites the binding
    ],
)
def test_packages_that_are_missing_or_too_old(monkeypatch, versions, name, text):
    monkeypatch.setattr(module, "version_of", lambda package: versions.get(package, "99.0"))
    assert any((f.name, f.status) == (name, PROBLEM) and text in f.text for f in examine(None))


@pytest.mark.parametrize(("enabled", "status"), [(False, PROBLEM), (True, OK)])
def test_a_python_without_its_gil(monkeypatch, enabled, status):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: enabled, raising=False)
    assert found("versions").status == status
    assert ("GIL is off" in found("versions").text) != enabled


class TestEndpoint:
    def test_port_taken(self, monkeypatch, taken):
        monkeypatch.setenv("TELEMETRY_PORT", str(taken))
        finding = found("endpoint")
        assert finding.status == ABSENT
        assert f"port {taken} is taken on 127.0.0.1 (Address already in use)" in finding.text
        port = int(finding.text.rpartition("port ")[2].split()[0])
        assert taken < port <= taken + 63
        with socket.create_server(("127.0.0.1", port)):
            pass

    def test_a_port_that_was_used_a_moment_ago(self, monkeypatch, taken):
        """Its last connection lingers in TIME_WAIT, which does not hinder the endpoint."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            client = socket.create_connection(("127.0.0.1", port))
            server.accept()[0].close()
            client.close()
        monkeypatch.setenv("TELEMETRY_PORT", str(port))
        assert found("endpoint").status == OK

    def test_free(self, monkeypatch, taken):
        with socket.create_server(("127.0.0.1", 0)) as server:
            free = server.getsockname()[1]
        monkeypatch.setenv("TELEMETRY_PORT", str(free))
        assert found("endpoint") == Finding(OK, "endpoint", f"port {free} is free on 127.0.0.1")


class TestRunFolder:
    def test_a_file_in_its_place(self, tmp_path, capsys):
        (tmp_path / "file").touch()
        for folder in ("file", "file/run"):
            finding = found("run folder", str(tmp_path / folder))
            assert finding.status == PROBLEM
            assert "is a file" in finding.text
        assert doctor(str(tmp_path / "file")) == 1

    def test_no_room_for_the_log(self, tmp_path, monkeypatch):
        usage = module.shutil.disk_usage(tmp_path)
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
        finding = found("run folder", str(tmp_path))
        assert finding.status == PROBLEM
        assert "1.0 MiB free" in finding.text

    def test_from_the_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TELEMETRY_RUN_DIR", str(tmp_path / "theirs"))
        assert f"{tmp_path}/theirs can be created" in found("run folder").text
        assert f"{tmp_path}/mine can be created" in found("run folder", str(tmp_path / "mine")).text


class TestGpu:
    def test_no_driver(self, monkeypatch):
        from telemetry.sources.nvml import NoGpuError

        def none(timeout_seconds=5.0):
            raise CollectorError("no NVIDIA driver") from NoGpuError("no NVIDIA driver")

        monkeypatch.setattr("telemetry.sources.nvml.device_summary", none)
        assert found("gpu") == Finding(ABSENT, "gpu", "no NVIDIA driver: there are no GPU metrics")

    def test_a_driver_that_hangs(self, monkeypatch):
        def hung(timeout_seconds=5.0):
            raise CollectorError("NVML has not answered for 5 s")

        monkeypatch.setattr("telemetry.sources.nvml.device_summary", hung)
        assert found("gpu").status == PROBLEM

    def test_alike_ones_share_a_line(self):
        pytest.importorskip("pynvml")
        hopper = [Gpu(uuid=f"GPU-{n}", name="Fake H100", gpm=True) for n in range(3)]
        state = State(gpus=[*hopper, Gpu(uuid="GPU-9", name="Fake V100", gpm=False)])
        with fake.installed(state):
            gpus = [finding for finding in examine(None) if finding.name == "gpu"]
        assert len(gpus) == 2
        assert gpus[0].text.startswith("0-2: Fake H100")
        assert "hardware counters" in gpus[0].text
        assert gpus[1].text.startswith("3: Fake V100")

    def test_a_gpu_that_torch_cannot_use(self, monkeypatch):
        import torch

        monkeypatch.setattr(torch.version, "cuda", None)
        place = CheckContext(Config.load({}, environ={}), gpus=True)
        ((status, text),) = module.check_cuda_events(place)
        assert status == PROBLEM
        assert "install a CUDA build" in text

    def test_cuda_that_hangs(self, monkeypatch):
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
    def test_events_on_a_real_gpu(self):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        assert found("cuda events").status == OK


class TestTheScreen:
    def test_it_fits_whatever_is_found(self):
        for count in (1, 14, 23, 60):
            text = render([Finding(PROBLEM, f"name {n}", "a long word or two " * 30) for n in range(count)])
            lines = text.splitlines()
            assert all(f"!! name {n} " in text for n in range(min(count, HEIGHT - 1)))
            assert len(lines) <= HEIGHT
            assert max(map(len, lines)) <= WIDTH
            assert lines[-1].startswith(f"{count} problem")

    def test_a_check_that_fails_is_a_finding(self, monkeypatch, capsys):
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
