"""Tests of kernels alone: that they compile, and their arithmetic."""
