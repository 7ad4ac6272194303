"""Needs of commands beside the package: an extra's modules, or a checkout."""
