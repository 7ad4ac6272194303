"""Tests under torch.compile."""
