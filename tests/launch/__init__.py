"""Tests of the scripts in launch/."""
