"""Training over pipelines: layouts, stages, steps."""
