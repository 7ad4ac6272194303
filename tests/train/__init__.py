"""Tests of `cce-dist train` and `eval`."""
