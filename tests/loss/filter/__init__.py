"""Tests of the filter: which columns stay, and how the others are stood for."""
