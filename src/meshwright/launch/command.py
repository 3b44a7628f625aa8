"""The command of a rank: the user's `train ...`, and what the launcher adds to start, resume or shrink the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from meshwright.errors import ConfigError

LAUNCHABLE = ("train",)


def check_command(command: Sequence[str]) -> tuple[str, ...]:
    """Returns the command to launch; raises if it is not one that several processes can run.

    Example:
        >>> check_command(["train", "--steps", "10"])
        ('train', '--steps', '10')
    """
    if not command:
        raise ConfigError("launch got no command.", hint="add it after --, e.g. -- train --run runs/NAME.")
    if command[0] not in LAUNCHABLE:
        raise ConfigError(f"cannot launch `{command[0]}`.", hint="launch a training run: -- train --run runs/NAME.")
    for option in ("--coordinator", "--num-processes", "--process-id"):
        if any(word == option or word.startswith(f"{option}=") for word in command):
            raise ConfigError(f"{option} is set by the launcher.", hint=f"leave out {option} after --.")
    return tuple(command)


def program() -> list[str]:
    """Returns the words that start `meshwright` with this Python."""
    return [sys.executable, "-m", "meshwright"]


def given(command: Sequence[str], option: str) -> str | None:
    """Returns the value of an option in a command, or None.

    Example:
        >>> given(["train", "--run", "a", "--run=b"], "--run")
        'b'
    """
    found = None
    for place, word in enumerate(command):
        if word == option and place + 1 < len(command):
            found = command[place + 1]
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


def to_resume(run: str | None) -> list[str]:
    """Returns the options that resume a run, or start it if it has no checkpoint yet."""
    return [] if run is None else ["--run", run, "--resume", "--or-start"]


def to_shrink(mesh: str, minibatches: int, *, before: int, now: int) -> list[str] | None:
    """Returns the options that run on `now` of `before` processes with the same batch, or None if the mesh forbids it.

    The data-parallel axis shrinks, because it crosses hosts, and the number of minibatches grows by the same factor, so
    that a step keeps its rows and a device its memory.

    Example:
        >>> to_shrink("dp:4,fsdp:2", 1, before=4, now=2)
        ['--mesh', 'dp:2,fsdp:2', '--minibatches', '2']
        >>> to_shrink("fsdp:8", 1, before=2, now=1) is None
        True
    """
    if before % now:
        return None
    factor = before // now
    if factor == 1:
        return ["--mesh", mesh, "--minibatches", str(minibatches)]
    axes = [axis.partition(":") for axis in mesh.split(",")]
    for place, (name, colon, size) in enumerate(axes):
        plain, at, where = size.partition("@")
        if name.strip().lstrip("!") in ("dp", "data") and plain.isdigit() and int(plain) % factor == 0:
            axes[place] = (name, colon, f"{int(plain) // factor}{at}{where}")
            return ["--mesh", ",".join("".join(axis) for axis in axes), "--minibatches", str(minibatches * factor)]
    return None
