"""Tests of cce_dist.testing."""
