"""Orders of work in a pipeline, and when its tasks end."""
