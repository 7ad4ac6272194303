"""Tests of the public functions and options beside `linear_cross_entropy`."""
