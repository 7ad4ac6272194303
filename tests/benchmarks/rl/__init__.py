"""Tests of the experiments with log-probabilities."""
