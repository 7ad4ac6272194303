"""Tests of the merge over ranks, and of MPI."""
