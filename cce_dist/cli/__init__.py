"""The command `cce-dist`, a file a subcommand."""

from cce_dist.core.old_names import attributes_of

# Once `cce_dist.cli` was a module with `app`.
__getattr__ = attributes_of("cce_dist.cli", "cce_dist.cli.main")
