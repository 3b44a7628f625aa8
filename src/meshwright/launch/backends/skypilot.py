"""A task file for SkyPilot: one process per node, which finds its rank and the coordinator in SkyPilot's variables."""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from meshwright.errors import ConfigError
from meshwright.launch.command import given
from meshwright.launch.launch_options import LaunchOptions

_PORT = 12345


def task(options: LaunchOptions, command: Sequence[str], *, token: str = "TOKEN") -> dict[str, Any]:
    """Returns the task as a dictionary.

    Example:
        >>> options = LaunchOptions(backend="skypilot", processes=2, nodes=2, accelerators="H100:8")
        >>> task(options, ["train", "--run", "/shared/run"])["num_nodes"]
        2
    """
    if given(command, "--run") is None:
        raise ConfigError(
            "a SkyPilot task needs a run folder.", hint="add --run PATH, on storage that the nodes share."
        )
    if options.processes != options.nodes:
        raise ConfigError(
            f"SkyPilot starts one process per node, but {options.processes} processes are wanted on {options.nodes}.",
            hint="pass the same number to --processes and --nodes; a process uses all GPUs of its node.",
        )
    words = ["meshwright", *command, *(word for word in ("--resume", "--or-start") if word not in command)]
    resources: dict[str, Any] = {"job_recovery": {"strategy": "FAILOVER", "max_restarts_on_errors": options.attempts}}
    total = None
    if options.accelerators is not None:
        resources["accelerators"] = options.accelerators
        count = options.accelerators.partition(":")[2] or "1"
        total = options.nodes * int(count) if count.isdigit() else None
    if options.image is not None:
        resources["image_id"] = f"docker:{options.image}"
    script = [
        *([f"export MESHWRIGHT_DEVICES={total}"] if total is not None else []),
        'first="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
        f'{shlex.join(words)} --coordinator "$first:{_PORT}" --num-processes "$SKYPILOT_NUM_NODES" '
        '--process-id "$SKYPILOT_NODE_RANK"',
    ]
    made: dict[str, Any] = {"name": options.name, "num_nodes": options.nodes, "resources": resources}
    return made | {"secrets": {"MESHWRIGHT_TOKEN": token}, "run": "\n".join(script) + "\n"}


def start(options: LaunchOptions, command: Sequence[str]) -> int:
    """Starts the task as a managed job, which SkyPilot restarts; with --dry-run, prints it as YAML."""
    made = task(options, command, token=secrets.token_hex(32) if not options.dry_run else "TOKEN")
    text = to_yaml(made)
    if options.dry_run:
        print(text, end="")
        return 0
    if shutil.which("sky") is None:
        raise ConfigError("sky is not on the PATH.", hint="pip install skypilot, or see --dry-run.")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:  # readable by the user alone, like all of them
        file.write(text)
        file.flush()
        return subprocess.run(["sky", "jobs", "launch", "--yes", file.name]).returncode


def to_yaml(made: dict[str, Any]) -> str:
    """Returns a task as YAML, with its script as a block of lines.

    Example:
        >>> print(to_yaml({"name": "x", "run": "one\\ntwo\\n"}), end="")
        name: x
        run: |
          one
          two
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    found: str = yaml.dump(made, Dumper=Dumper, sort_keys=False, width=1000)
    return found
