"""Tests of `cce-dist doctor`."""
