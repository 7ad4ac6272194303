"""Tests of ranks that find one another."""
