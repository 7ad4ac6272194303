"""Tests of the planner's models."""
