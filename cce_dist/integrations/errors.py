"""The error of a model or a framework that an integration does not support."""


class PatchError(RuntimeError):
    """Names the model or the call that cannot be patched, and what to do instead."""
