"""Groups of a pipeline's ranks, and what they send one another."""
