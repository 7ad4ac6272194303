"""Triton kernels, one idea a file. They import triton only: no torch, no shapes, no choices."""
