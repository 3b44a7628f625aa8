"""A batch script for Slurm: one srun per attempt, requeued on preemption, in an array of attempts that take turns."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.launch.command import given, program
from meshwright.launch.launch_options import LaunchOptions


def batch_script(options: LaunchOptions, command: Sequence[str], *, token_file: Path) -> str:
    """Returns the batch script for a command.

    Every attempt runs the same command with `--resume --or-start`. The next element of the array continues after a
    failure; exit code 75 requeues the same one; 0 cancels those that wait.

    Args:
        token_file: file with the token of the run, which only the user can read.

    Example:
        >>> options = LaunchOptions(backend="slurm", processes=2, nodes=2, devices_per_process=8)
        >>> text = batch_script(options, ["train", "--run", "/shared/run"], token_file=Path("/home/me/token"))
        >>> "#SBATCH --gpus-per-task=8" in text, "export MESHWRIGHT_DEVICES=16" in text
        (True, True)
    """
    run = given(command, "--run")
    if run is None:
        raise ConfigError(
            "a Slurm job needs a run folder.", hint="add --run PATH, on a file system that all nodes share."
        )
    own = [f"--engine-args {argument}" for argument in options.engine_args if not argument.startswith("-")]
    if own:
        raise ConfigError(f"{own[0]} is not an option of sbatch.", hint="write --engine-args=--partition=gpu.")
    train = [*program(), *command]
    train += [option for option in ("--resume", "--or-start") if option not in command]
    logs = options.logs or str(_local_folder(command, run))
    each = options.processes // options.nodes
    devices = options.devices_per_process
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={options.name}",
        f"#SBATCH --nodes={options.nodes}",
        f"#SBATCH --ntasks-per-node={each}",
        *([f"#SBATCH --gpus-per-task={devices}"] if devices else []),
        f"#SBATCH --array=1-{options.attempts}%1",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --signal=TERM@{round(options.grace_seconds)}",
        f"#SBATCH --output={logs}/{options.name}-%A.out",
        *(f"#SBATCH {argument}" for argument in options.engine_args),
        "",
        "unset MESHWRIGHT_TOKEN",  # of the submitting shell
        f"export MESHWRIGHT_TOKEN_FILE={shlex.quote(str(token_file))}",
        *([f"export MESHWRIGHT_DEVICES={devices * options.processes}"] if devices else []),
        'restart="${SLURM_RESTART_COUNT:-0}"',
        f'echo "attempt $SLURM_ARRAY_TASK_ID of {options.attempts}, restart $restart, on $SLURM_JOB_NODELIST"',
        f"srun --kill-on-bad-exit=1 --label {shlex.join(train)}",
        "code=$?",
        'echo "attempt $SLURM_ARRAY_TASK_ID ended with exit code $code"',
        'case "$code" in',
        "    0)  # finished: the other attempts are not needed",
        '        scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"',
        '        rm -f "$MESHWRIGHT_TOKEN_FILE" ;;',
        '    75) scontrol requeue "$SLURM_JOB_ID" ;;  # preempted: it saved, and continues',
        "esac",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _local_folder(command: Sequence[str], run: str) -> Path:
    """Returns the folder beside a run; for a run in an object store, beside its local copy or the current folder."""
    local = given(command, "--local-run") if "://" in run else run
    return Path.cwd() if local is None else Path(local).absolute().parent


def submit(options: LaunchOptions, command: Sequence[str]) -> int:
    """Writes the batch script beside the run and submits it; with --dry-run, prints it."""
    folder = _local_folder(command, given(command, "--run") or "runs/run")
    token_file, script = folder / f".{options.name}.token", folder / f"{options.name}.sbatch"
    text = batch_script(options, command, token_file=token_file)
    if options.dry_run:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not on the PATH.", hint="run this on a login node, or see --dry-run.")
    folder.mkdir(parents=True, exist_ok=True)
    token_file.unlink(missing_ok=True)  # it may be a link, or a file that others can read
    handle = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(handle, "w") as file:
        file.write(secrets.token_hex(32))
    script.write_text(text)
    return subprocess.run(["sbatch", str(script)]).returncode
