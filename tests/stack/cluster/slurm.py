"""A Slurm cluster of two nodes on one machine: its own munge, a controller, and two daemons at different ports."""

import getpass
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from stack.cluster.servers import LOGS, stop
from stack.cluster.shipped import DEPLOY
from stack.jobs import SCRIPT, TOKEN, environment, must_have, wait_for
from tests.free_ports import free_ports

NODES = ("127.0.0.1", "127.0.0.2")
"""Names that lead to this machine without a name server: the shipped job meets, and is scraped, by the nodes' names."""

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=5
FirstJobId={first_job}
NodeName={first_node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={first_port} CPUs=64 Gres=gpu:8 State=UNKNOWN
NodeName={second_node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={second_port} CPUs=64 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
"""Nodes as large as the shipped job asks for; nothing that needs a cgroup, systemd or a database."""

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")


class Slurm:
    """The cluster. Daemons are started by `launch`, which sees to it that none outlives the tests."""

    def __init__(self, launch):
        for program in PROGRAMS:
            must_have(program)
        self._launch = launch
        self._processes = []
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path has to be short
        first = free_ports(3)
        (self.folder / "state").mkdir()
        self._configuration = self.folder / "slurm.conf"
        self._configuration.write_text(
            CONFIGURATION.format(
                folder=self.folder, socket=self.folder / "munge.socket", user=getpass.getuser(), controller=first,
                first_node=NODES[0], first_port=first + 1, second_node=NODES[1], second_port=first + 2,
                first_job=1 + os.getpid() % 900,  # the rendezvous' port follows from the job's number
            )
        )  # fmt: skip
        for gpu in range(8):
            (self.folder / f"gpu{gpu}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")

    def start(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed", "--num-threads=2",
        )  # fmt: skip
        wait_for("munge", (self.folder / "munge.socket").exists)
        self._start("slurmctld", "-D", "-i")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node, name=f"slurmd-{node}")
        wait_for("two idle nodes", lambda: self.run("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"], every=0.2)

    def _start(self, program, *arguments, name=None):
        name = name or program
        self._processes.append(
            self._launch([must_have(program), *arguments], name, SLURM_CONF=str(self._configuration))
        )
        LOGS[name] = self._launch.folder / f"{name}.stderr"

    def stop(self):
        """End the jobs, whose supervisors would outlive the daemons; then the daemons."""
        try:
            self.run("scancel", f"--user={getpass.getuser()}")
            wait_for("no job", lambda: not self.run("squeue", "-h"), every=0.2)
        finally:
            stop(self._processes)
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, command, *arguments, **variables):
        """What a command of Slurm's prints.

        Raises:
            ValueError: it failed.
        """
        token = {TOKEN: self._launch.token}  # a job inherits the environment of who submits it
        done = subprocess.run(
            [command, *map(str, arguments)], cwd=self.folder,
            env=environment(**token, SLURM_CONF=str(self._configuration), **variables),
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        if done.returncode:
            raise ValueError(f"{command}: {done.stdout}{done.stderr}")
        return done.stdout

    def state(self, job):
        """``RUNNING``, ``COMPLETED``, ``CANCELLED`` …"""
        text = self.run("scontrol", "show", "job", job, "--oneliner")
        return dict(word.partition("=")[::2] for word in text.split())["JobState"]


class SlurmJob:
    """The shipped job, made smaller by options of sbatch: it asks for 8 GPUs and 64 cores of each node.

    Args:
        slurm: the cluster.
        shared: a folder that all nodes share.
        until: the job trains until this file is there. Its name is the job's.
    """

    def __init__(self, slurm, shared, until):
        self.until = until
        self.slurm = slurm
        out = shared / f"{until.name}.out"
        self.number = slurm.run(
            "sbatch", "--parsable", "--gpus-per-node=1", "--cpus-per-task=1", f"--output={out}", "--chdir", shared,
            DEPLOY / "slurm" / "train.sbatch", SCRIPT, "--until", until, "--pace-seconds", "0.05",
            SHARED_DIR=str(shared), PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        ).strip()  # fmt: skip
        self.run = f"slurm-{self.number}"
        self.run_dir = shared / "runs" / self.run
        self.out = out

    def said(self):
        return self.out.read_text() if self.out.exists() else "nothing"

    def ended(self, *states):
        wait_for(
            f"{self.run} to be {states}\n{self.said()}", lambda: self.slurm.state(self.number) in states, every=0.2
        )
