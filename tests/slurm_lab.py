"""A real Slurm of two nodes on loopback, for tests: daemons, keys, state and ports of its own.

Needs root and Debian's slurm-wlm and munge. All partitions share the nodes; jobs in `high` preempt those in
the others, which go back into the queue, but for `cancelled`; only `low` gives them time to save.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel", "scontrol", "srun", "sinfo")
READY_SECONDS = 60
NODES = ("one", "two")
CPUS = 4  # of each node; what Slurm is told, however many there are
MEMORY_MB = 100_000  # of each node, likewise
MAX_ARRAY = 3  # MaxArraySize: a study of four trials needs two arrays
PORTS = 100  # every srun listens on a few

CONFIG = """

# A requeued job waits until its credential has expired: 5 seconds here, two minutes by default.
ClusterName=testlab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SrunPortRange={first_port}-{last_port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=4000
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MaxArraySize={max_array}
MpiDefault=none
ReturnToService=2
KillWait=20
JobRequeue=1
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=20 MaxTime=INFINITE State=UP
PartitionName=requeued Nodes=ALL PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=cancelled Nodes=ALL PriorityTier=1 PreemptMode=CANCEL MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no lab can be had here, or None."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)}): apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "the Slurm of the tests needs root"


class SlurmLab:
    """Context manager: a running cluster; `environment` makes commands use it."""

    def __init__(self) -> None:
        # Not below pytest's folders: munged wants to be reachable by every user.
        self.folder = folder = Path(tempfile.mkdtemp(prefix="slurm_lab_"))
        self.config = folder / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.config)}

    def __enter__(self) -> SlurmLab:
        self._write()
        try:
            munge = self.folder / "munge"
            paths = [f"--key-file={munge}/key", f"--socket={munge}/socket", f"--seed-file={munge}/seed"]
            logs = [f"--log-file={munge}/log", f"--pid-file={self.folder}/munged.pid"]
            self.run("munged", *paths, *logs)
            self.start_controller()
            for name in NODES:
                self.start_node(name)
            deadline = time.monotonic() + READY_SECONDS
            while self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T", check=False).split() != ["idle"] * 2:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"Slurm did not come up: {self._logs()}")
                time.sleep(0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root", "--signal=KILL", check=False)
        for name in (*NODES, "slurmctld", "munged"):
            self.stop(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_controller(self) -> None:
        self.run("slurmctld", "-f", str(self.config))

    def start_node(self, name: str) -> None:
        self.run("slurmd", "-f", str(self.config), "-N", name)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """End one of the daemons (slurmctld, munged, or a node's slurmd), and wait until it has."""
        try:
            pid = int((self.folder / f"{name}.pid").read_text())
            os.kill(pid, number)
        except (OSError, ValueError):
            return
        deadline = time.monotonic() + 20
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command against this cluster; returns what it printed."""
        environment = {**os.environ, **self.environment}
        # Daemons must not keep our pipes open.
        output = self.folder / f"output-{secrets.token_hex(4)}"
        with output.open("w") as file:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        text = output.read_text()
        output.unlink()
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {text}")
        return text

    def states(self) -> dict[str, str]:
        """Of all jobs that Slurm remembers, by id."""
        text = self.run("squeue", "-h", "-r", "-t", "all", "-o", "%i %T")
        return dict(line.split() for line in text.splitlines())

    def _logs(self) -> str:
        return "".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))

    def _write(self) -> None:
        for name in ("munge", "state", *(f"spool-{name}" for name in NODES)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        first = _free_ports(PORTS)
        ports = {
            "controller_port": first,
            "first_port": first + 1 + len(NODES),
            "last_port": first + PORTS - 1,
        }
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={first + 1 + index} CPUs={CPUS} "
            f"RealMemory={MEMORY_MB} State=UNKNOWN"
            for index, name in enumerate(NODES)
        )
        values = {"host": _host(), "folder": self.folder, "nodes": nodes, "max_array": MAX_ARRAY}
        self.config.write_text(CONFIG.format(**values, **ports))


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nobody listens on."""
    for first in range(21000 + os.getpid() % 100 * count, 60000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise RuntimeError("no free ports")
