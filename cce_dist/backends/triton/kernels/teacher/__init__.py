"""Kernels of two heads over one vocabulary: a student's and a teacher's."""
