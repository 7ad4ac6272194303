"""The gradients of every method against float64, on the inputs that a training run sees."""
