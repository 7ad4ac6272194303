"""The loss over the ranks of a pipeline, in phases."""
