"""The `meshwright` command: one small file per subcommand. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from meshwright.errors import MeshwrightError


def main(args: Sequence[str] | None = None) -> None:
    """Runs one subcommand and ends the process with its exit code: 0 fine, 1 a problem, 2 wrong usage."""
    try:
        import tyro
    except ModuleNotFoundError:
        print("error: the command line needs tyro.\nhint: pip install tyro rich", file=sys.stderr)
        sys.exit(1)

    from meshwright.cli.checkpoint import checkpoint
    from meshwright.cli.doctor import doctor
    from meshwright.cli.ledger import ledger
    from meshwright.cli.plan import plan
    from meshwright.cli.report import report
    from meshwright.cli.rules import rules
    from meshwright.cli.train import make_train
    from meshwright.cli.verify import verify

    args = list(sys.argv[1:] if args is None else args)

    try:
        code = tyro.extras.subcommand_cli_from_dict(
            {
                "train": make_train(args),
                "plan": plan,
                "report": report,
                "checkpoint": checkpoint,
                "ledger": ledger,
                "verify": verify,
                "rules": rules,
                "doctor": doctor,
            },
            prog="meshwright",
            description="Place JAX models on any mesh, prove that they compute the same there, and train them.",
            args=args,
        )
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        sys.exit(0)
    sys.exit(code)
