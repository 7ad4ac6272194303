"""Gradients of every method against float64, on the inputs of a training run's loss."""
