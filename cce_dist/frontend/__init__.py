"""From arguments to results: checks, DTensors, reductions, torch.compile."""
