"""A local Slurm cluster: munged, slurmctld, and a slurmd for each node, in one directory.

All daemons are real; only the nodes share a machine, each in a network of its own (network_namespaces.py). It requires
root and Debian's slurm-wlm."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.testing.network_namespaces import NamespacesUnavailable, StarNetwork, star_network

START_SECONDS = 60.0
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
CONF = """\
ClusterName=phalanx
SlurmctldHost={host}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmUnavailable(OSError):  # noqa: N818 - a fact about the machine
    """The process may not start Slurm, or a tool is missing."""


@dataclass(frozen=True)
class LocalSlurm:
    """A running Slurm cluster."""

    directory: Path
    network: StarNetwork
    environment: dict[str, str] = field(repr=False)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes."""
        return tuple(self.network.hosts)

    def run(self, *args: str, cwd: Path | None = None) -> str:
        """Run a Slurm command, and return its output."""
        command = [*self.network.hub.prefix, *args]
        result = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f"{' '.join(args)}: {result.stderr}"
        return result.stdout.strip()

    def submit(self, script: Path) -> str:
        """Submit a script, which runs in its own directory, and return the job number."""
        return self.run("sbatch", "--parsable", script.name, cwd=script.parent)

    def job_info(self, job: str) -> dict[str, str]:
        """Return Slurm's fields of a job."""
        fields = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return dict(item.partition("=")[::2] for item in fields if "=" in item)

    def wait(self, job: str, condition: Callable[[dict[str, str]], bool], seconds: float) -> dict[str, str]:
        """Wait until the fields of a job meet a condition, and return them.

        Raises TimeoutError if the condition is not met in time.
        """
        deadline = time.monotonic() + seconds
        while not condition(info := self.job_info(job)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {info['JobState']} ({info['Reason']}) after {seconds:.0f} s")
            time.sleep(0.2)
        return info


@contextmanager
def local_slurm(directory: Path, nodes: int) -> Iterator[LocalSlurm]:
    """Run a Slurm cluster, each node with all cores of this machine.

    The first node has this machine's own name, so that all nodes can resolve it. Daemons and jobs end on exit. Raises
    SlurmUnavailable if Slurm cannot be started.
    """
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        raise SlurmUnavailable(f"{', '.join(missing)}: not installed (apt-get install slurm-wlm)")
    if os.geteuid() != 0:
        raise SlurmUnavailable("it requires root")
    host = socket.gethostname().partition(".")[0]
    names = (host, *(f"{host}-{number}" for number in range(1, nodes)))
    with ExitStack() as daemons:
        try:
            network = daemons.enter_context(star_network(names))
        except NamespacesUnavailable as error:
            raise SlurmUnavailable(str(error)) from None
        slurm = LocalSlurm(directory, network, {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")})
        _write_conf(slurm, host)
        key = directory / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        endings = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge_files = [f"--{name}={directory}/munge.{ending}" for name, ending in endings.items()]
        daemons.enter_context(_run_daemon(slurm, "munge", ["munged", "--force", *munge_files]))
        daemons.enter_context(_run_daemon(slurm, "slurmctld", [*network.hub.prefix, "slurmctld"]))
        for name in names:
            command = [*network.hosts[name].prefix, "slurmd", "-N", name]
            daemons.enter_context(_run_daemon(slurm, f"slurmd-{name}", command))
        count_idle = "sinfo", "-h", "-t", "idle", "-o", "%D"
        _wait_until(lambda: slurm.run(*count_idle) == str(nodes), "its nodes are idle", slurm)
        try:
            yield slurm
        finally:
            slurm.run("scancel", "--user=root")
            _wait_until(lambda: not slurm.run("squeue", "-h"), "its jobs are gone", slurm)


def _write_conf(slurm: LocalSlurm, host: str) -> None:
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr={node.address} CPUs={os.cpu_count()}"
        for name, node in slurm.network.hosts.items()
    )
    (slurm.directory / "state").mkdir()
    address = slurm.network.hosts[host].hub
    # No cgroup is used, or visible from a namespace.
    (slurm.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    conf = CONF.format(host=host, address=address, directory=slurm.directory, nodes=nodes)
    (slurm.directory / "slurm.conf").write_text(conf)


@contextmanager
def _run_daemon(slurm: LocalSlurm, name: str, command: Sequence[str]) -> Iterator[None]:
    """Run a process that daemonizes, and terminate it by its pid file on exit."""
    pid_file = slurm.directory / f"{name}.pid"
    started = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=60)
    if started.returncode:
        raise SlurmUnavailable(f"{' '.join(command)}: {started.stderr.strip()}")
    _wait_until(lambda: pid_file.is_file() and pid_file.read_text().strip().isdecimal(), f"{name} runs", slurm)
    pid = int(pid_file.read_text())
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            _wait_until(lambda: _has_ended(pid), f"{name} has ended", slurm)


def _has_ended(pid: int) -> bool:
    """Return whether a process has exited, or is a zombie, which process 1 of a container may not reap."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def _wait_until(condition: Callable[[], bool], description: str, slurm: LocalSlurm) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}: {log.read_text()[-800:]}" for log in sorted(slurm.directory.glob("*.log")))
            raise TimeoutError(f"timed out after {START_SECONDS:.0f} s: {description}\n{logs}")
        time.sleep(0.1)
