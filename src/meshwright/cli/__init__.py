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

    from meshwright.cli.doctor import doctor
    from meshwright.cli.rules import rules
    from meshwright.cli.verify import verify

    try:
        code = tyro.extras.subcommand_cli_from_dict(
            {"doctor": doctor, "rules": rules, "verify": verify},
            prog="meshwright",
            description="Place JAX models on any mesh.",
            args=args,
        )
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        sys.exit(0)
    sys.exit(code)
