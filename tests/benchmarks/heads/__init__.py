"""Tests of `cce-dist bench`, and of the evidence."""
