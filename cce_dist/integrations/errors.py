"""The error of a model or a job that an integration does not support."""

from __future__ import annotations


class PatchError(RuntimeError):
    """An error for a model, a job or a release that an integration does not support."""
