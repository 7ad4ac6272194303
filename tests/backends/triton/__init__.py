"""Tests of the Triton backend."""
