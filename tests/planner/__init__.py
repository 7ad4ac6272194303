"""Tests of the planner's layouts, and of what it says of them."""
