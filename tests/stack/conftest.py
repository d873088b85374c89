"""What the stack tests stand on: jobs started as a user would start them.

Every process carries a token in its environment; at the end whatever still carries it is killed, by its pid. What the
tests of a folder share is in the folder's own conftest.py.
"""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from importlib.util import find_spec

import psutil
import pytest

from stack.jobs import (
    NODE,
    REQUIRED,
    SCRIPT,
    TOKEN,
    Job,
    environment,
    must_have,
)
from telemetry.node.board import Board
from tests.faults.warm_python import ForkedProcess
from tests.free_ports import free_ports


@pytest.fixture(scope="session")
def promtool():
    return must_have("promtool")


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Starts processes with the token; none survives the session.

    A torchrun is forked from a process that has torch. What it starts are processes as ever.
    """
    token = uuid.uuid4().hex
    folder = tmp_path_factory.mktemp("stack")

    def start(command, name, **variables):
        env = environment(**{TOKEN: token}, **variables)
        with open(folder / f"{name}.stdout", "wb") as out, open(folder / f"{name}.stderr", "wb") as err:
            if command[1:3] == ["-m", "torch.distributed.run"]:
                with open(os.devnull, "rb") as nothing:
                    streams = {"stdin": nothing.fileno(), "stdout": out.fileno(), "stderr": err.fileno()}
                    return ForkedProcess(command[1:], folder, env, **streams)
            return subprocess.Popen(
                command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    started = []

    def keep(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    keep.folder, keep.token = folder, token
    try:
        yield keep
    finally:
        for process in started:  # a forked one has the environment of its server, without the token
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for _ in range(3):  # what is forked while we look is found the next time
            for process in psutil.process_iter():
                try:
                    ours = process.environ().get(TOKEN) == token
                except (psutil.Error, OSError):
                    continue
                if ours:
                    try:
                        os.kill(process.pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
        for process in started:
            process.wait(10)
        for run_dir in folder.glob("*/logs"):  # a killed job's board would stay for an hour
            shutil.rmtree(Board(run_dir.parent.name, str(run_dir.parent), NODE).path, ignore_errors=True)


@pytest.fixture(scope="session")
def torchrun(launch):
    """Starts a job with torchrun."""
    try:
        there = find_spec("torch.distributed.run") is not None
    except ImportError:
        there = False
    if not there:
        text = "torch has no torch.distributed.run"
        pytest.fail(text) if REQUIRED else pytest.skip(text)

    def start(name, ranks, port, options=(), arguments=(), **variables):
        run_dir, until = launch.folder / name, launch.folder / f"{name}.stop"
        process = launch(
            [
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_ports(1)),
                "-m", "telemetry", "run", "--run-dir", str(run_dir), "--port", str(port), *options,
                str(SCRIPT), "--until", str(until), *arguments,
            ],
            name, **variables,
        )  # fmt: skip
        return Job([process], run_dir, port, until)

    return start
