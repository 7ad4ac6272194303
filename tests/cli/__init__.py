"""Tests of the command's own output."""
