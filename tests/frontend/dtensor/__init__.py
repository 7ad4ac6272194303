"""Tests of a head that is a DTensor."""
