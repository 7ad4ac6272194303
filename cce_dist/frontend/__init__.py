"""The way from arguments to results: checks, DTensors, reductions, torch.compile."""
