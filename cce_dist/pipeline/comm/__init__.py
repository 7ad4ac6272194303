"""Groups of a pipeline's ranks, and the transfers between ranks."""
