"""Tests of the loss over pipeline ranks."""
