"""The `meshwright` command: one small file per subcommand. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.hardware.libtpu import quiet_libtpu


def main(args: Sequence[str] | None = None) -> None:
    """Runs one subcommand and exits with its code: 0 success, 1 error, 2 wrong usage, 75 preempted, 130 Ctrl-C."""
    args = list(sys.argv[1:] if args is None else args)
    quiet_libtpu()
    code: int | None = None
    try:
        with contextlib.ExitStack() as stack:
            if args[:1] == ["train"]:  # neither failing output nor an early signal may break off a run
                from meshwright.loop.logging.progress import steady_output
                from meshwright.loop.safety.preemption import EarlySignals

                stack.enter_context(steady_output())
                stack.enter_context(EarlySignals())
            code = _run(args)
    except KeyboardInterrupt as error:
        code = _interrupted(error)
    sys.exit(code)


def _run(args: list[str]) -> int | None:
    import tyro

    from meshwright.cli.checkpoint import checkpoint
    from meshwright.cli.doctor import doctor
    from meshwright.cli.eval import evaluate
    from meshwright.cli.generate import generate
    from meshwright.cli.ledger import ledger
    from meshwright.cli.plan import COMMANDS as PLAN_COMMANDS
    from meshwright.cli.plan import join_words
    from meshwright.cli.report import report
    from meshwright.cli.rules import rules
    from meshwright.cli.train import train
    from meshwright.cli.verify import verify

    try:
        code: int | None = tyro.extras.subcommand_cli_from_dict(
            {
                "train": train,
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
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        sys.stderr.close()
        return 0


def _interrupted(error: KeyboardInterrupt) -> int:
    """Prints why the command ended, and returns its exit code."""
    import signal

    from meshwright.loop.logging.progress import let_go, steady
    from meshwright.loop.safety.preemption import EXIT_INTERRUPTED, EXIT_PREEMPTED, Interrupted

    asked = isinstance(error, Interrupted) and error.number != signal.SIGINT
    text = f"stopped by {error} before training started" if asked else "interrupted"
    print(text, file=steady(sys.stderr), flush=True)
    let_go(sys.stderr)
    return EXIT_PREEMPTED if asked else EXIT_INTERRUPTED


def simulate_devices(count: int) -> None:
    """Sets the number of CPU devices that JAX simulates; has no effect with an accelerator or after JAX started."""
    import jax

    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def show(thing: Any) -> None:
    """Prints an object in its rich form on a terminal, else as plain text."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(thing, highlight=False, markup=False)
    else:
        print(thing)
