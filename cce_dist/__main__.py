"""The command `cce-dist`; `python -m cce_dist` for torchrun: torchrun -m cce_dist train CONFIG."""

import sys

from cce_dist.distributed.launchers import rank_from_environment
from cce_dist.needs.extras import explain_missing


def main() -> None:
    """Runs the command. A missing module is reported in one line, with exit code 2."""
    try:
        from cce_dist.cli.main import app

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
