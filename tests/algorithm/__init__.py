"""Tests of the four steps on several ranks."""
