"""Small models trained with every method, and their loss on held-out text."""
