"""The error where a training framework and its integration do not fit."""

from __future__ import annotations


class PatchError(RuntimeError):
    """An error for a framework's release or state that an integration does not support."""
