"""Benchmark of distillation: the divergence of a student's head from a teacher's."""
