"""What the doctor finds, in surroundings that are made to be well or ill."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
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
    assert names == expected | {"board", "workers", "schedstat", "pressure", "cgroup", "memory"}


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

    def test_an_address_that_is_not_ours(self, monkeypatch):
        monkeypatch.setenv("TELEMETRY_HOST", "192.0.2.1")
        finding = found("endpoint")
        assert finding.status == PROBLEM
        assert "TELEMETRY_HOST" in finding.text

    def test_off(self, monkeypatch):
        monkeypatch.setenv("TELEMETRY_PORT", "off")
        assert found("endpoint").status == ABSENT

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


class TestSettings:
    def test_a_bad_one(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setenv("TELEMETRY_INTERVAL_SECONDS", "soon")
        finding = found("settings")
        assert finding.status == PROBLEM
        assert "interval_seconds (from TELEMETRY_INTERVAL_SECONDS) = 'soon'" in finding.text
        assert f"{tmp_path}/mine can be created" in found("run folder", str(tmp_path / "mine")).text
        assert doctor(None) == 1
        assert "1 problem, see the lines with !!" in capsys.readouterr().out

    def test_a_bad_folder(self):
        assert found("settings", "").status == PROBLEM

    def test_a_name_that_is_none(self, monkeypatch):
        monkeypatch.setenv("TELEMETRY_PROT", "1")
        ignored = [f for f in examine(None) if f.name == "settings" and "TELEMETRY_PROT" in f.text]
        assert [f.status for f in ignored] == [ABSENT]

    def test_disabled(self, monkeypatch, capsys):
        monkeypatch.setenv("TELEMETRY_DISABLED", "yes")
        assert found("enabled") == Finding(PROBLEM, "enabled", "TELEMETRY_DISABLED=yes turns everything off; unset it")
        assert doctor(None) == 1


class TestVersions:
    def test_old_torch(self, monkeypatch):
        monkeypatch.setattr(module, "version_of", lambda package: {"torch": "2.3.1+cu121"}.get(package, "99.0"))
        assert found("versions").status == PROBLEM
        assert "2.4 or newer" in found("versions").text

    def test_a_python_without_its_gil(self, monkeypatch):
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
        assert found("versions").status == PROBLEM
        assert "GIL is off" in found("versions").text
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True)
        assert found("versions").status == OK

    def test_nothing_installed(self, monkeypatch):
        monkeypatch.setattr(module, "version_of", lambda package: None)
        assert found("versions").status == PROBLEM
        assert "pip install structlog psutil msgspec prometheus-client" in found("packages").text
        assert found("cuda events").status == ABSENT

    def test_the_package_that_overwrites_the_binding(self, monkeypatch):
        monkeypatch.setattr(module, "version_of", lambda package: "11.5.3" if package == "pynvml" else "99.0")
        texts = [f.text for f in examine(None) if f.name == "packages" and f.status == PROBLEM]
        assert len(texts) == 1
        assert "pip uninstall pynvml" in texts[0]


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

    def test_events_off(self, monkeypatch):
        monkeypatch.setenv("TELEMETRY_GPU_EVENTS", "off")
        assert found("cuda events").status == ABSENT

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
