"""The command `cce-dist`; `python -m cce_dist` for torchrun: torchrun -m cce_dist train CONFIG."""

import sys

from .cli_extras import explain_missing
from .launchers import rank_from_environment


def main() -> None:
    """Run the command; a module that is missing is one line, and exit code 2."""
    try:
        from .cli import app

        app(prog_name="cce-dist")
    except ModuleNotFoundError as error:
        line = explain_missing(error, sys.argv[1:])
        if line is None:
            raise
        if rank_from_environment() == 0:
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
