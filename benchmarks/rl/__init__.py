"""Experiments with log-probabilities for reinforcement learning."""
