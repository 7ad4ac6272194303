"""The command `cce-dist`, a file a subcommand."""
