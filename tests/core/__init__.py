"""Tests of cce_dist.core."""
