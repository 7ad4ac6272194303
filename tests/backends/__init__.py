"""Tests of what both backends do alike."""
