"""python -m cce_dist.integrations.transformers [option ...] script.py [argument ...]"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import get_args

from cce_dist.integrations.transformers.patch import apply, remove
from cce_dist.options import Backend, GradientMode, LogitsMode

CHOICES = {"gradient": GradientMode, "logits": LogitsMode, "backend": Backend}


def main(arguments: list[str] | None = None) -> int:
    """Runs a script whose models of transformers compute their losses without logits."""
    parser = argparse.ArgumentParser(
        prog="python -m cce_dist.integrations.transformers",
        description=main.__doc__,
        allow_abbrev=False,
    )
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", choices=get_args(choices), default=argparse.SUPPRESS)
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="argument")
    options = vars(parser.parse_args(arguments))
    script, rest = options.pop("script"), options.pop("rest")
    apply(**options)
    sys.argv = [script, *rest]
    # Python does the same when it starts the script itself.
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
