"""Tests of cce_dist.rl."""
