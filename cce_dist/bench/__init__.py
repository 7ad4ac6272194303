"""Benchmarks: correctness first, then time, memory and error beside dense torch."""
