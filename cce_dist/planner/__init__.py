"""Pipelines on paper: orders of work, and how long they take. No torch."""
