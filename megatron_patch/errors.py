"""What goes wrong where Megatron and the patch meet."""


class PatchError(RuntimeError):
    """Megatron, or this model of it, is not what the patch works with; says which flag to change.

    A RuntimeError: Megatron's own way to say that a configuration cannot run.
    """
