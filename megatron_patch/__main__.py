"""python -m megatron_patch [option ...] pretrain_gpt.py [Megatron's argument ...]"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import metadata, util
from pathlib import Path

from megatron_patch.errors import PatchError
from megatron_patch.options import PatchOptions, parse
from megatron_patch.patch import Status, apply, remove


def main(arguments: list[str] | None = None) -> int:
    options, checks, script = parse(sys.argv[1:] if arguments is None else arguments)
    speaks = checks or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    try:
        status = apply(options=options)
    except PatchError as error:
        if speaks:
            print(f"megatron_patch: cannot run: {error}", file=sys.stderr)
        return 1
    if speaks:
        print(describe(status, options), flush=True)
    if checks:
        remove()
        return 0
    sys.argv = script
    # Python does the same when it starts the script itself.
    sys.path[0] = str(Path(script[0]).resolve().parent)
    runpy.run_path(script[0], run_name="__main__")
    return 0


def describe(status: Status, options: PatchOptions) -> str:
    versions = {name: _version(name) for name in ("cce-dist", "torch", "triton")}
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    screened = "logits=screened, " if options.logits == "screened" else ""
    where = "over all pipeline stages, " if options.vocab_over_pipeline else ""
    return (
        f"megatron_patch: {libraries}, megatron.core {status.version} ({status.file}): the losses "
        f"of language models are computed without logits, {where}gradient={options.gradient}, "
        f"{screened}backend={options.backend}"
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown" if util.find_spec(name.replace("-", "_")) else "not installed"


if __name__ == "__main__":
    sys.exit(main())
