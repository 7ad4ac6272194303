"""Options of the patched loss, from Python, the command line or the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

GRADIENTS = ("filtered", "exact")
LOGITS = ("full", "screened")
BACKENDS = ("auto", "torch", "triton")
PREFIX = "MEGATRON_PATCH_"


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

    gradient: str = "filtered"
    logits: str = "full"
    quantize_once: bool = True
    softcap: float | None = None
    vocab_size: int | None = None
    backend: str = "auto"
    workspace_bytes: int | None = None
    keep_logits: bool | None = None
    check_ranks: bool = False
    vocab_over_pipeline: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("gradient", GRADIENTS), ("logits", LOGITS), ("backend", BACKENDS)):
            if getattr(self, name) not in allowed:
                names = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} must be one of {names}, got {getattr(self, name)!r}")
        if self.logits == "screened" and self.gradient != "filtered":
            raise ValueError(
                "logits='screened' needs gradient='filtered', whose filter chooses the columns to "
                f"compute in full precision, got {self.gradient!r}"
            )
        if not self.quantize_once and self.logits != "screened":
            raise ValueError(f"quantize_once=False needs logits='screened', got {self.logits!r}")
        if self.keep_logits and self.gradient != "exact" and self.logits != "screened":
            rule = "keep_logits needs gradient='exact' or logits='screened'"
            raise ValueError(f"{rule}, got {self.gradient!r} and {self.logits!r}")
        if self.vocab_over_pipeline and (self.keep_logits or self.check_ranks):
            name = "keep_logits" if self.keep_logits else "check_ranks"
            raise ValueError(f"{name} is not supported with vocab_over_pipeline")
        if self.softcap is not None and not 0 < self.softcap < float("inf"):
            raise ValueError(f"softcap must be a positive number or None, got {self.softcap!r}")
        for name in ("vocab_size", "workspace_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be at least 1, got {value!r}")

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] = os.environ, /, **keywords: object
    ) -> PatchOptions:
        """Reads options from MEGATRON_PATCH_GRADIENT and the like; keywords override variables.

        Raises:
            ValueError: an unknown MEGATRON_PATCH_ variable, or a value of the wrong type.
        """
        named = {PREFIX + field.name.upper(): field.name for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in named:
                raise ValueError(f"{variable} is no option; there are {', '.join(sorted(named))}")
            try:
                values[named[variable]] = READ[named[variable]](text)
            except ValueError as error:
                raise ValueError(f"{variable}: {error}") from None
        values.update(keywords)
        return cls(**values)


def _number_or_none(kind: type) -> Any:
    return lambda text: None if text.lower() == "none" else kind(text)


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ValueError(f"must be 1, true, 0 or false, got {text!r}")
    return values[text.lower()]


def _flag_or_none(text: str) -> bool | None:
    return None if text.lower() == "none" else _flag(text)


# A parser for the text of each option.
READ: dict[str, Any] = {
    "gradient": str,
    "logits": str,
    "quantize_once": _flag,
    "softcap": _number_or_none(float),
    "vocab_size": _number_or_none(int),
    "backend": str,
    "workspace_bytes": _number_or_none(int),
    "keep_logits": _flag_or_none,
    "check_ranks": _flag,
    "vocab_over_pipeline": _flag,
}


def parse(arguments: Sequence[str]) -> tuple[PatchOptions, bool, list[str]]:
    """Parses our options, up to the script's name.

    Returns: the options; True if the run only checks; the script and its arguments.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_patch",
        description="Runs a Megatron script with the loss of cce_dist.",
        epilog="Each option can also be given as MEGATRON_PATCH_GRADIENT=exact and the like.",
        allow_abbrev=False,
    )
    parser.add_argument("--check", action="store_true", help="report the settings, and end")
    helps = {
        "gradient": "filtered or exact",
        "logits": "full, or screened: in 8 bits, but for the columns that matter",
        "quantize_once": "with screened, one 8-bit copy of the head a step: true or false",
        "softcap": "c of logits c tanh(z / c), as Gemma's",
        "vocab_size": "rows of the head from this one on are padding",
        "backend": "auto, torch or triton",
        "workspace_bytes": "bound of the logits in memory at once",
        "keep_logits": "with exact or screened, keep logits that fit the workspace: true or false",
        "check_ranks": "compare the ranks' shared arguments before every loss: true or false",
        "vocab_over_pipeline": "the output layer's rows on all pipeline stages: true or false",
    }
    for name, text in helps.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=READ[name], default=argparse.SUPPRESS, help=text)
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    read = vars(parser.parse_args(list(arguments)))
    checks, script = read.pop("check"), read.pop("script")
    if not script and not checks:
        parser.error("name the script to run, as in: python -m megatron_patch pretrain_gpt.py ...")
    try:
        return PatchOptions.from_environment(**read), checks, script
    except ValueError as error:
        parser.error(str(error))
