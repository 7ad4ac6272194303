"""Options of the patched loss, from Python, the command line or the environment."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, get_args, get_type_hints

from cce_dist import LossOptions

PREFIX = "MEGATRON_PATCH_"
FLAGS = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True)
class PatchOptions:
    """Options of the patched loss; all other settings are Megatron's own.

    Args:
        gradient: "filtered" computes the columns that matter and keeps the mass of the others;
            "exact" computes every column.
        logits: "full"; or "screened", for 16-bit models with gradient="filtered": all logits in 8
            bits, and logits of the columns that matter once more in full precision.
        quantize_once: with "screened" one 8-bit copy of the head, V / tp (h + 8) bytes, serves all
            microbatches of a call of Megatron's schedule; False: each microbatch makes a copy.
        softcap: c of logits c tanh(z / c), as in Gemma; None: no cap. It applies to the loss
            alone: a script that reads logits gets Megatron's.
        vocab_size: rows of the head from this one on are padding and leave the softmax; None: they
            are classes, as in Megatron.
        backend: "triton", "torch", or "auto" for the fastest that can run.
        workspace_bytes: bound of the logits in memory at once; None: the loss's default, 64 MiB
            or 8 KiB a token if that is more, and twice as much where "exact" keeps logits.
        keep_logits: logits that fit the workspace stay for the backward, on a GPU. With "exact"
            the forward then allocates the weight's gradient, too; with "screened" exact logits
            alone stay. None: they stay where the Triton kernels compute.
        check_ranks: before every loss compare the arguments that ranks must share; for debugging.
        vocab_over_pipeline: GPTModel's output layer has its rows on all pipeline stages, and
            Megatron's schedule without interleaving computes the loss on all of them.
    Raises:
        ValueError: a value is not allowed; the message names the option.
    """

    gradient: str = LossOptions.gradient
    logits: str = LossOptions.logits
    quantize_once: bool = True
    softcap: float | None = LossOptions.softcap
    vocab_size: int | None = None
    backend: str = LossOptions.backend
    workspace_bytes: int | None = LossOptions.workspace_bytes
    keep_logits: bool | None = LossOptions.keep_logits
    check_ranks: bool = LossOptions.check_ranks
    vocab_over_pipeline: bool = False

    def __post_init__(self) -> None:
        for name in ("quantize_once", "vocab_over_pipeline"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.vocab_over_pipeline and (self.keep_logits or self.check_ranks):
            name = "keep_logits" if self.keep_logits else "check_ranks"
            raise ValueError(f"{name} is not supported with vocab_over_pipeline")
        if self.loss.logits != "screened" and not self.quantize_once:
            raise ValueError(f"quantize_once=False needs logits='screened', got {self.logits!r}")
        size = self.vocab_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"vocab_size must be an int of at least 1, got {size!r}")

    @cached_property
    def loss(self) -> LossOptions:
        """The options of each token's loss; LossOptions raises if it does not allow one."""
        shared = {x.name for x in fields(LossOptions)} & vars(self).keys()
        return LossOptions(reduction="none", **{name: getattr(self, name) for name in shared})

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ, /, **keywords: object
    ) -> PatchOptions:
        """Reads options from MEGATRON_PATCH_GRADIENT and the like; keywords override variables.

        Raises:
            ValueError: an unknown keyword or MEGATRON_PATCH_ variable, or a wrong value.
        """
        named = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        unknown = sorted(keywords.keys() - set(named.values()))
        if unknown:
            raise ValueError(f"options must be of {', '.join(named.values())}, got {unknown}")
        values: dict[str, Any] = {}
        for variable in filter(lambda name: name.startswith(PREFIX), environment):
            if variable not in named:
                raise ValueError(f"{variable} is no option; there are {', '.join(sorted(named))}")
            try:
                values[named[variable]] = _reader_of(named[variable])(environment[variable])
            except ValueError as error:
                raise ValueError(f"{variable}: {error}") from None
        return cls(**{**values, **keywords})


def _reader_of(name: str) -> Callable[[str], Any]:
    """Returns a parser for the text of an option, by the option's type."""
    annotation = get_type_hints(PatchOptions)[name]
    kinds = get_args(annotation) or (annotation,)

    def read(text: str) -> Any:
        if type(None) in kinds and text.lower() == "none":
            return None
        if bool not in kinds:
            return int(text) if int in kinds else float(text) if float in kinds else text
        if text.lower() not in FLAGS:
            raise ValueError(f"must be 1, true, 0 or false, got {text!r}")
        return FLAGS[text.lower()]

    # argparse's message about other text has this name.
    read.__name__ = name
    return read


def parse(arguments: Sequence[str]) -> tuple[PatchOptions, bool, list[str]]:
    """Parses our options, up to the script's name.

    Returns: the options; True if the run only checks; the script and its arguments.
    """
    described = (inspect.getdoc(PatchOptions) or "").partition("Raises:")[0]
    parser = argparse.ArgumentParser(
        prog="python -m megatron_patch",
        description="Runs a Megatron script with the loss of cce_dist.",
        epilog=f"{described}\nIn the environment they are MEGATRON_PATCH_GRADIENT and the like.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="report the settings, and end")
    for field in fields(PatchOptions):
        option, read = "--" + field.name.replace("_", "-"), _reader_of(field.name)
        parser.add_argument(option, type=read, default=argparse.SUPPRESS, metavar="VALUE")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    values = vars(parser.parse_args(list(arguments)))
    checks, script = values.pop("check"), values.pop("script")
    if not script and not checks:
        parser.error("name the script to run, as in: python -m megatron_patch pretrain_gpt.py ...")
    try:
        return PatchOptions.from_environment(**values), checks, script
    except ValueError as error:
        parser.error(str(error))
