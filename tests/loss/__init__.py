"""Tests of `linear_cross_entropy` on one rank."""
