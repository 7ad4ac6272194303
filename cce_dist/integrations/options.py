"""Options of the loss that a user of a framework sets; the framework decides all others."""

from __future__ import annotations

from typing import Any

from cce_dist import LossOptions

OPTIONS = ("gradient", "filter", "logits", "screen", "backend", "workspace_bytes", "keep_logits")


def keywords_of(options: LossOptions, *, of_tokens: bool) -> dict[str, Any]:
    """Returns the user's options as keywords of `linear_cross_entropy`.

    Args: of_tokens: the loss is each token's, whose upstream gradient the forward cannot know:
        "in_forward" becomes "filtered".
    """
    keywords = {name: getattr(options, name) for name in OPTIONS}
    if of_tokens and options.gradient == "in_forward":
        keywords["gradient"] = "filtered"
    return keywords


def differences(old: LossOptions, new: LossOptions) -> tuple[str, str]:
    """Returns the options in which two sets differ, of each as text for a message."""
    names = [name for name in OPTIONS if getattr(old, name) != getattr(new, name)]
    first, second = (
        ", ".join(f"{name}={getattr(each, name)!r}" for name in names) for each in (old, new)
    )
    return first, second
