"""Tests of orders of work in a pipeline."""
