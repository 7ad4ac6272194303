"""Checks of a machine, its software and its ranks: `cce-dist doctor`."""
