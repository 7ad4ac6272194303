"""Tests of the benchmark of distillation."""
