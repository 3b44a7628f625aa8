"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd, all in one temporary folder."""

import contextlib
import os
import shutil
import socket
import subprocess
import time

CONF = """
ClusterName=small
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={port}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
JobRequeue=1
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs={cpus} State=UNKNOWN
NodeName={host}-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host},{host}-2 Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    """Returns why this machine cannot run it, or None."""
    if os.geteuid() != 0:
        return "starting Slurm needs root"
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=_PATH) is None]
    return f"Slurm is not installed ({', '.join(missing)})" if missing else None


_PATH = f"{os.environ['PATH']}:/usr/sbin"


@contextlib.contextmanager
def small_slurm(folder):
    """Starts the cluster, and yields the variables that its commands need."""
    started = []

    def start(*command):
        with (folder / f"{command[0]}-{len(started)}.out").open("w") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=variables))

    variables = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
    variables = {
        name: value for name, value in variables.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    port, port_1, port_2 = (each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    host = socket.gethostname()  # the first node, whose name must resolve
    (folder / "state").mkdir()
    (folder / "munge").mkdir(mode=0o700)
    conf = CONF.format(host=host, folder=folder, port=port, port_1=port_1, port_2=port_2, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(conf)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    try:
        files = [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed")]
        start("munged", "-F", "-f", f"--socket={folder}/munge.socket", f"--key-file={key}", *files)
        _wait(lambda: (folder / "munge.socket").exists())
        start("slurmctld", "-D")
        for name in (host, f"{host}-2"):
            (folder / f"spool-{name}").mkdir()
            start("slurmd", "-D", "-N", name)
        _wait(lambda: _idle(variables) == 2, seconds=60)
        yield variables
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()


def _idle(variables):
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, env=variables)
    return done.stdout.split().count("idle")


def _wait(found, seconds=20):
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, "Slurm did not start"
        time.sleep(0.1)
