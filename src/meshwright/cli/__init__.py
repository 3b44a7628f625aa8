"""The `meshwright` command: one small file per subcommand. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from meshwright import interrupts
from meshwright.errors import MeshwrightError
from meshwright.hardware.libtpu import quiet_libtpu, skip_libtpu
from meshwright.interrupts import EarlySignals, outcome
from meshwright.launch.pulse import start_pulse


def main(args: Sequence[str] | None = None) -> None:
    """Runs one subcommand and exits with its code: 0 success, 1 error, 2 wrong usage, 75 preempted, 130 Ctrl-C."""
    args = list(sys.argv[1:] if args is None else args)
    quiet_libtpu()
    if args[:1] == ["plan"]:  # plans need no accelerator
        skip_libtpu()
    if args[:1] == ["launch"]:  # the parent of processes that use JAX; it does not import JAX itself
        from meshwright.cli.launch import main as launch

        sys.exit(launch(args[1:]))
    if args[:1] == ["train"]:
        start_pulse()
    signals = EarlySignals()
    code: int | str | None = None
    try:
        with contextlib.ExitStack() as stack:
            code = _run(args, stack, signals)
    except KeyboardInterrupt as error:
        signals.number = getattr(error, "number", signal.SIGINT)
    except SystemExit as ended:
        code = ended.code
    except Exception as error:  # after a signal, a library may have turned the interrupt into an error of its own
        if signals.number is None and not isinstance(error, MeshwrightError):
            raise
        if signals.number is None:
            code = _failed(error)
    if signals.number is not None:
        code = _interrupted(signals.number, trains=args[:1] == ["train"])
    sys.exit(code)


def _run(args: list[str], stack: contextlib.ExitStack, signals: EarlySignals) -> int | None:
    # A signal during these imports ends the process: see `meshwright.interrupts`.
    import tyro

    from meshwright.cli.checkpoint import checkpoint
    from meshwright.cli.doctor import doctor
    from meshwright.cli.eval import evaluate
    from meshwright.cli.generate import generate
    from meshwright.cli.ledger import ledger
    from meshwright.cli.plan_command import COMMANDS as PLAN_COMMANDS
    from meshwright.cli.plan_command import join_words
    from meshwright.cli.report import report
    from meshwright.cli.rules import rules
    from meshwright.cli.stdout import checked_output
    from meshwright.cli.train import train
    from meshwright.cli.verify import verify
    from meshwright.launch.launch_options import LaunchOptions
    from meshwright.loop.logging.progress import steady_output

    # Failing output must not break off a run, but other commands exist for their output.
    stack.enter_context(steady_output() if args[:1] == ["train"] else checked_output())
    stack.enter_context(signals)
    code: int | None = tyro.extras.subcommand_cli_from_dict(
        {
            "train": train,
            "launch": LaunchOptions,
            **PLAN_COMMANDS,
            "generate": generate,
            "eval": evaluate,
            "report": report,
            "checkpoint": checkpoint,
            "ledger": ledger,
            "verify": verify,
            "rules": rules,
            "doctor": doctor,
        },
        prog="meshwright",
        description="Place JAX models on any mesh, check them against one device, plan and train them.",
        args=join_words(args),
    )
    return code


def _failed(error: Exception) -> int:
    from meshwright.loop.logging.progress import steady

    print(f"error: {error}", file=steady(sys.stderr), flush=True)
    return 1


def _interrupted(number: int, *, trains: bool) -> int:
    """Prints why the command ended, and returns its exit code; a process of the command ends here."""
    if interrupts.watch is not None:  # e.g. the second Ctrl-C of a run
        interrupts.watch.end(number)
    from meshwright.loop.logging.progress import let_go, steady

    text, code = outcome(number, trains=trains)
    print(text, file=steady(sys.stderr), flush=True)
    let_go(sys.stderr)
    return code


def simulate_devices(count: int) -> None:
    """Sets the number of CPU devices that JAX simulates; has no effect with an accelerator or after JAX started."""
    import jax

    from meshwright.mesh.simulate import check_simulated

    check_simulated(count)
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def require_one_process(command: str) -> None:
    """Raises if mpirun or srun started several processes of a command that would not share their work."""
    from meshwright.distributed.roll_call import LaunchError
    from meshwright.distributed.schedulers import find_place

    place = find_place()
    if place is not None:
        raise LaunchError(
            f"meshwright {command} runs in one process, on the devices of one host; {place.started_by} started "
            f"{place.num_processes}.",
            hint="start it once, e.g. with srun --ntasks=1; in Python, all processes may call make_generator alike.",
        )


def show(thing: Any) -> None:
    """Prints an object in its rich form on a terminal, else as plain text."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(thing, highlight=False, markup=False)
    else:
        print(thing)
