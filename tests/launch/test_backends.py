"""What each backend would start: its script or manifest, checked against schemas where their packages are installed."""

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from meshwright.cli.launch import main
from meshwright.distributed.roll_call import LaunchError
from meshwright.distributed.schedulers import ProcessSlot, check_device_count, find_place, local_devices
from meshwright.errors import ConfigError
from meshwright.launch.backends.jobset import manifest
from meshwright.launch.backends.mpi import MpiRanks, read_endings
from meshwright.launch.backends.skypilot import task
from meshwright.launch.backends.slurm import batch_script, submit
from meshwright.launch.events import Ending
from meshwright.launch.launch_options import LaunchOptions

TRAIN = ["train", "--run", "/data/my run", "--steps", "9"]
GPUS = {"processes": 4, "nodes": 2, "devices_per_process": 4}


def dry_run(capsys, *words):
    assert main([*words, "--dry-run", "--", *TRAIN]) == 0
    return capsys.readouterr()


def test_mpirun_on_hosts_with_a_spare(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_TOKEN", "t" * 64)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    ranks = MpiRanks(
        TRAIN,
        logs=tmp_path,
        beats=tmp_path,
        show=print,
        hosts=["a", "b", "c"],
        ranks_per_host=2,
        arguments=["--bind-to"],
    )
    words = ranks.words([0, 2], ["--resume"])
    assert words[words.index("-n") + 1] == "4"
    assert words[words.index("--host") + 1] == "a:2,c:2"
    passed = [words[place + 1] for place, word in enumerate(words) if word == "-x"]
    assert {"JAX_PLATFORMS", "MESHWRIGHT_TOKEN", "MESHWRIGHT_HEARTBEAT"} <= set(passed)
    assert "t" * 64 not in " ".join(words)  # other users can read command lines
    assert words[-6:] == [*TRAIN, "--resume"]
    assert "--bind-to" in words


def test_mpirun_names_the_rank_that_failed():
    code = "Process name: [[3,1],2]\n  Exit code:    70\n-----"
    assert read_endings(70, code, "hung", 4)[2] == Ending(code=70, message="hung")
    assert read_endings(70, code, "hung", 4)[0] == Ending(code=76)
    assert {ending.code for ending in read_endings(75, "", "", 2).values()} == {75}
    assert read_endings(-9, "", "", 2)[0].signal == 9
    assert read_endings(1, "no slots", "no slots", 2)[0] == Ending(code=1, message="no slots")


def test_the_batch_script_of_slurm(capsys, tmp_path):
    options = LaunchOptions(backend="slurm", engine_args=("--partition=gpu",), **GPUS)
    text = batch_script(options, TRAIN, token_file=Path("/home/me/.token"))
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --gpus-per-task=4",
        "#SBATCH --array=1-10%1",
        "#SBATCH --requeue",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --partition=gpu",
        "export MESHWRIGHT_DEVICES=16",
        "export MESHWRIGHT_TOKEN_FILE=/home/me/.token",
    ):
        assert f"\n{line}\n" in text
    assert "train --run '/data/my run' --steps 9 --resume --or-start\n" in text
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert dry_run(capsys, "--backend", "slurm").out.startswith("#!/bin/bash\n#SBATCH --job-name=meshwright\n")
    with pytest.raises(ConfigError, match=r"a Slurm job needs a run folder"):
        batch_script(options, ["train"], token_file=Path("t"))


@pytest.mark.parametrize(("code", "wanted"), [(0, "scancel --state=PENDING 7"), (75, "scontrol requeue 8"), (1, "")])
def test_the_batch_script_ends_requeues_or_leaves_it_to_the_next_attempt(tmp_path, code, wanted):
    for name, text in {
        "srun": f"exit {code}",
        "scancel": 'echo scancel "$@"',
        "scontrol": 'echo scontrol "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = batch_script(LaunchOptions(backend="slurm"), TRAIN, token_file=Path("t"))
    slurm = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "n1"}
    env = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == code
    first, last = "attempt 1 of 10, restart 0, on n1\n", f"attempt 1 ended with exit code {code}\n"
    assert done.stdout == first + last + (f"{wanted}\n" if wanted else "")


def test_the_token_of_a_slurm_job_is_never_written_where_others_can_read_it(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    old, link = tmp_path / "others", tmp_path / ".meshwright.token"
    old.write_text("theirs")
    link.symlink_to(old)  # in a folder that several users can write to
    options, command = LaunchOptions(backend="slurm"), ["train", "--run", str(tmp_path / "run")]
    assert submit(options, command) == 0
    assert (old.read_text(), link.is_symlink()) == ("theirs", False)
    link.chmod(0o644)
    token = link.read_text()
    assert submit(options, command) == 0
    assert link.stat().st_mode & 0o777 == 0o600
    assert len(token) == len(link.read_text()) == 64
    assert token != link.read_text()


def test_every_gpu_of_a_slurm_node_is_used(monkeypatch):
    step = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    for name, value in (step | {"SLURM_NTASKS": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x2)")
    assert find_place() == ProcessSlot("srun", 1, 2, 0, 1)
    assert local_devices(find_place()) is None  # one process per node: all of them
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    assert local_devices(find_place()) == [0]
    monkeypatch.setenv("MESHWRIGHT_DEVICES_PER_PROCESS", "2")
    assert local_devices(find_place()) == [0, 1]
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "2")  # Slurm shows each task its own
    assert local_devices(find_place()) is None
    monkeypatch.setenv("MESHWRIGHT_DEVICES", "16")
    check_device_count(16)
    with pytest.raises(LaunchError, match=r"asked for 16 devices, but the processes see 2"):
        check_device_count(2)


def test_the_manifest_of_kubernetes(capsys):
    secret, jobset = manifest(LaunchOptions(backend="k8s", image="me/x", processes=2), TRAIN, token="secret")
    assert secret["stringData"] == {"token": "secret"}
    assert "secret" not in json.dumps(jobset).replace("secretKeyRef", "")
    printed = list(yaml.safe_load_all(dry_run(capsys, "--backend", "k8s", "--image", "me/x", "--processes", "2").out))
    assert printed[1] == jobset
    container = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    host = "meshwright-ranks-0-0.meshwright:12345"
    added = ["--resume", "--or-start", "--coordinator", host, "--num-processes", "2"]
    assert container["command"] == ["meshwright", *TRAIN, *added, "--process-id", "$(JOB_COMPLETION_INDEX)"]
    for changes, text in (
        ({}, "needs a container image"),
        ({"image": "x", "name": "A_b"}, "not a name for Kubernetes"),
    ):
        with pytest.raises(ConfigError, match=text):
            manifest(LaunchOptions(backend="k8s", **changes), TRAIN)
    with pytest.raises(ConfigError, match="absolute run folder"):
        manifest(LaunchOptions(backend="k8s", image="x"), ["train"])


@pytest.mark.skipif(
    importlib.util.find_spec("kubeflow_trainer_api") is None,
    reason="kubeflow-trainer-api, which has the schema of JobSet, is not installed",
)
def test_the_manifest_follows_the_schema_of_jobset():
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    _, jobset = manifest(LaunchOptions(backend="k8s", image="me/x", **GPUS), TRAIN)
    # Reading refuses wrong types, drops unknown fields and adds defaults, so nothing may be missing afterwards.
    assert kept(jobset, json.loads(JobsetV1alpha2JobSet.from_dict(jobset).to_json())) == jobset


def kept(given, read):
    """The part of `read` at the places of `given`."""
    if isinstance(given, dict):
        return {name: kept(value, read[name]) for name, value in given.items() if name in read}
    if isinstance(given, list):
        return [kept(*pair) for pair in zip(given, read, strict=True)]
    return read


def test_the_task_of_skypilot(capsys):
    made = task(LaunchOptions(backend="skypilot", processes=2, nodes=2, accelerators="H100:8", image="me/x"), TRAIN)
    assert made["resources"]["accelerators"] == "H100:8"
    assert made["resources"]["image_id"] == "docker:me/x"
    assert "export MESHWRIGHT_DEVICES=16\n" in made["run"]
    assert "train --run '/data/my run' --steps 9 --resume --or-start --coordinator" in made["run"]
    assert yaml.safe_load(dry_run(capsys, "--backend", "skypilot").out)["num_nodes"] == 1
    with pytest.raises(ConfigError, match=r"one process per node, but 4 processes are wanted on 2"):
        task(LaunchOptions(backend="skypilot", processes=4, nodes=2), TRAIN)


def test_ray_and_mpi_say_what_they_would_start(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = dry_run(capsys, "--backend", "ray", "--processes", "2")
    assert "2 processes on Ray, 4 simulated devices each (8 in all)" in done.err
    assert done.out.split()[1:4] == ["-m", "meshwright", "train"]
    done = dry_run(capsys, "--backend", "mpi", "--processes", "2")
    assert done.out.startswith("mpirun ")
    assert done.out.endswith("--devices 4\n")


def test_wrong_hosts(capsys):
    assert main(["--backend", "mpi", "--hosts", "a", "--nodes", "2", "--processes", "2", "--", *TRAIN]) == 1
    assert "2 nodes are wanted, but --hosts names 1" in capsys.readouterr().err
    assert main(["--backend", "mpi", "--hosts", "a", "b", "--nodes", "2", "--processes", "2", "--", *TRAIN]) == 1
    assert "heartbeats need a shared folder" in capsys.readouterr().err


@pytest.mark.parametrize(("backend", "program"), [("slurm", "sbatch"), ("skypilot", "sky"), ("k8s", "kubectl")])
def test_a_missing_program_is_an_error(capsys, monkeypatch, tmp_path, backend, program):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert main(["--backend", backend, "--image", "x", "--", "train", "--run", str(tmp_path / "run")]) == 1
    assert f"{program} is not on the PATH" in capsys.readouterr().err
